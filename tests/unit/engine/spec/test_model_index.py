"""Indices of model folders, plain and modular."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from maskserve_common.config import ConfigError
from maskserve_engine.spec.model_index import read_model_index

VAE = ["diffusers", "AutoencoderKLFlux2"]


def write(folder: Path, name: str, index: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(index), "utf-8")


@pytest.mark.parametrize("named", [VAE, [None, None]])
def test_a_modular_index_reads_as_a_plain_one(tmp_path: Path, named: list[Any]) -> None:
    """Parts that a modular pipeline loads from elsewhere have no class but in their hint."""
    place = {"pretrained_model_name_or_path": "x", "subfolder": "vae", "type_hint": VAE}
    index = {"_class_name": "Flux3DistilledModularPipeline", "vae": [*named, place]}
    write(tmp_path, "modular_model_index.json", index)
    plain = {"_class_name": "Flux3DistilledModularPipeline", "vae": VAE}
    assert read_model_index(tmp_path) == plain
    write(tmp_path, "model_index.json", {**plain, "_class_name": "FluxPipeline"})
    assert read_model_index(tmp_path)["_class_name"] == "FluxPipeline"


def test_a_folder_without_an_index_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a model folder \(no model_index.json\)"):
        read_model_index(tmp_path)
