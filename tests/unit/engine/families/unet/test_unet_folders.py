"""Facts of a Stable Diffusion folder, and folders that are not served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from maskserve_common.config import ConfigError
from maskserve_engine.families.registry import load_adapter
from maskserve_engine.families.specs import load_spec
from tests.fakes.jobs import config_of
from tests.fakes.tiny_unet import TEXT_LENGTH


@pytest.fixture
def folder(tiny_unets: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the tiny SDXL inpainting model, to be spoilt."""
    return Path(shutil.copytree(tiny_unets["sdxl-fill"], tmp_path / "model"))


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("name", "semantics", "micro"),
    [("sd-base", "inpaint", False), ("sd-fill", "fill", False),
     ("sdxl-base", "inpaint", True), ("sdxl-fill", "fill", True)],
)  # fmt: skip
def test_spec_is_read_from_the_folder(
    tiny_unets: dict[str, Path], name: str, semantics: str, micro: bool
) -> None:
    spec = load_spec(tiny_unets[name])
    assert (spec.family, spec.semantics.name, spec.guidance) == ("unet", semantics, "cfg")
    assert spec.micro_conditioning is micro
    assert (spec.token_pixels, spec.size_multiple, spec.native_resolution) == (4, 4, 64)
    assert spec.text_tokens(512) == TEXT_LENGTH


@pytest.mark.parametrize(
    ("change_of", "message"),
    [
        ({"down_block_types": ["AttnDownBlock2D"] * 3}, "AttnDownBlock2D"),
        ({"up_block_types": ["ResnetUpsampleBlock2D"] * 3}, "ResnetUpsampleBlock2D"),
        ({"mid_block_type": "UNetMidBlock2D"}, "mid_block_type"),
        ({"in_channels": 8}, "takes 8 channels"),
        ({"out_channels": 8}, "gives 8"),
        (
            {"cross_attention_dim": 48},
            "takes text 48 wide and text_encoder and text_encoder_2 give",
        ),
        ({"class_embed_type": "projection"}, "class_embed_type"),
        ({"addition_embed_type": "image"}, "addition_embed_type"),
    ],
)
def test_a_unet_that_is_not_served_is_refused_in_one_sentence(
    folder: Path, change_of: dict[str, Any], message: str
) -> None:
    change(folder / "unet" / "config.json", **change_of)
    with pytest.raises(ConfigError, match=message) as refused:
        load_spec(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("part", ["vae", "unet", "text_encoder", "tokenizer_2", "scheduler"])
def test_a_folder_without_a_part_is_refused(folder: Path, part: str) -> None:
    shutil.rmtree(folder / part)
    with pytest.raises(ConfigError, match=part):
        load_spec(folder)


@pytest.mark.parametrize("length", [None, 0, 10**30, "77"])
def test_a_tokenizer_that_names_no_length_is_refused(folder: Path, length: Any) -> None:
    change(folder / "tokenizer" / "tokenizer_config.json", model_max_length=length)
    with pytest.raises(ConfigError, match="model_max_length"):
        load_spec(folder)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"_class_name": "EulerAncestralDiscreteScheduler"}, "EulerAncestralDiscreteScheduler"),
        ({"prediction_type": "sample"}, "prediction_type sample"),
        ({"num_train_timesteps": 500}, "500 train timesteps"),
        (
            {"_class_name": "DPMSolverMultistepScheduler", "algorithm_type": "sde-dpmsolver++"},
            "draws noise",
        ),
        ({"_class_name": "DDIMScheduler", "thresholding": True}, "thresholding"),
        ({"_class_name": "PNDMScheduler", "skip_prk_steps": False}, "skip_prk_steps"),
    ],
)
def test_a_sampler_that_is_not_served_is_refused(
    folder: Path, changed: dict[str, Any], message: str
) -> None:
    change(folder / "scheduler" / "scheduler_config.json", **changed)
    with pytest.raises(ConfigError, match=message):
        load_adapter(config_of(folder))
