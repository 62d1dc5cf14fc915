"""Settings for adapters: SETTINGS.loras and SETTINGS.adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from maskserve_common.config import Config, ModelConfig
from maskserve_common.contracts.request import AcceptedEdit, Lora
from maskserve_common.contracts.settings import (
    EditSettings,
    LoraSetting,
    dump_settings,
    parse_settings,
)
from maskserve_common.errors import AdapterNotFound, InvalidRequest
from maskserve_lora.store import AdapterStore
from maskserve_triton.accept import accept_edit
from tests.fakes.loras import OTHER_MODEL, lora, write
from tests.fakes.model_specs import FILL_SPEC

DEMO = Path(__file__).parents[3] / "assets" / "models" / "demo"


def parsed(**settings: Any) -> EditSettings:
    return parse_settings(json.dumps(settings).encode())


def test_loras_are_names_with_scales() -> None:
    loras = [{"name": "hollow", "scale": 0.8}, {"name": "ninth-colour"}, {"name": "x", "scale": -2}]
    settings = parsed(loras=loras, adapters="fast")
    assert settings.loras == (
        LoraSetting(name="hollow", scale=0.8),
        LoraSetting(name="ninth-colour"),
        LoraSetting(name="x", scale=-2.0),
    )
    assert settings.adapters == "fast"
    assert parse_settings(dump_settings(settings)) == settings
    assert parsed(loras=[]).loras == parsed(loras=None).loras == parsed().loras == ()
    assert parsed().adapters == "exact"


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ("hollow", "loras"),
        ({"name": "hollow"}, "loras"),
        ([{"name": f"a{n}"} for n in range(5)], "loras"),
        (["hollow"], "loras[0]"),
        ([{"name": "a"}, None], "loras[1]"),
        ([{}], "loras[0].name"),
        ([{"name": None}], "loras[0].name"),
        ([{"name": 3}], "loras[0].name"),
        ([{"name": ""}], "loras[0].name"),
        ([{"name": "../secret"}], "loras[0].name"),
        ([{"name": "/etc/passwd"}], "loras[0].name"),
        ([{"name": "https://example.org/a"}], "loras[0].name"),
        ([{"name": "a\0"}], "loras[0].name"),
        ([{"name": "x" * 129}], "loras[0].name"),
        ([{"name": "a"}, {"name": "b"}, {"name": "a", "scale": 2}], "loras[2].name"),
        ([{"name": "a", "scale": "1"}], "loras[0].scale"),
        ([{"name": "a", "scale": True}], "loras[0].scale"),
        ([{"name": "a", "scale": float("nan")}], "loras[0].scale"),
        ([{"name": "a", "scale": float("inf")}], "loras[0].scale"),
        ([{"name": "a", "scale": 1e30}], "loras[0].scale"),
        ([{"name": "a", "scale": 10**400}], "loras[0].scale"),
        ([{"name": "a", "version": "0" * 32}], "loras[0].version"),
    ],
)
def test_other_forms_are_refused_by_name(value: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parsed(loras=value)
    assert refused.value.field == f"SETTINGS.{field}"


def test_reproducible_edits_are_exact() -> None:
    config = Config(model=ModelConfig(path="models/demo"))
    with pytest.raises(InvalidRequest, match=r"SETTINGS\.adapters"):
        accept_edit(parsed(reproducible=True, adapters="fast"), b"", FILL_SPEC, config)
    accept_edit(parsed(reproducible=True), b"", FILL_SPEC, config)


@pytest.fixture
def store(tmp_path: Path) -> AdapterStore:
    write(tmp_path / "store" / "good.safetensors")
    write(tmp_path / "store" / "other.safetensors", lora(OTHER_MODEL, prefix="unet."))
    plain = Config(model=ModelConfig(path=str(DEMO)), runtime_dir=str(tmp_path))
    config = structs.replace(
        plain, adapters=structs.replace(plain.adapters, store=str(tmp_path / "store"))
    )
    adapter_store = AdapterStore(config)
    adapter_store.catalogue.scan()
    return adapter_store


def test_names_become_files_when_an_edit_is_accepted(store: AdapterStore) -> None:
    config, catalogue = store._config, store.catalogue

    def accept(*names: str) -> AcceptedEdit:
        settings = parsed(loras=[{"name": name} for name in names])
        return accept_edit(settings, b"", FILL_SPEC, config, catalogue)

    accepted = accept("good")
    assert accepted.loras == (Lora(name="good", version=catalogue.find("good").version),)
    assert AcceptedEdit.from_json(accepted.to_json()) == accepted
    with pytest.raises(AdapterNotFound, match=r"SETTINGS\.loras\[1\]\.name: there is no adapter x"):
        accept("good", "x")
    with pytest.raises(InvalidRequest, match=r"SETTINGS\.loras\[0\]\.name: adapter other is for"):
        accept("other")


def test_what_is_left_out_of_a_file_goes_on_with_the_edit(
    tmp_path: Path, store: AdapterStore
) -> None:
    """And into META."""
    tensors = {**lora(), **lora({"encoder.x": (8, 8)}, prefix="text_encoder_2.")}
    write(tmp_path / "store" / "part.safetensors", tensors)
    store.catalogue.scan(at_once=True)
    settings = parsed(loras=[{"name": "part"}])
    [part] = accept_edit(settings, b"", FILL_SPEC, store._config, store.catalogue).loras
    [note] = part.notes
    assert "T5" in note
    assert not part.text, "no encoder waits for what is left out"


def test_without_a_catalogue_loras_are_refused() -> None:
    config = Config(model=ModelConfig(path="models/demo"))
    with pytest.raises(InvalidRequest, match="not served here"):
        accept_edit(parsed(loras=[{"name": "x"}]), b"", FILL_SPEC, config)
