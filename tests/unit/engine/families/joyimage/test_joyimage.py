"""The particulars of JoyImage-Edit: its prompts, and folders of other layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from maskserve_common.config import ConfigError
from maskserve_common.errors import InvalidRequest
from maskserve_engine.families.joyimage.adapter import embed_times
from maskserve_engine.families.registry import load_adapter
from maskserve_engine.families.specs import load_spec
from tests.fakes.jobs import config_of
from tests.fakes.tiny_families import FAMILIES
from tests.fakes.tiny_joyimage import LENGTH
from tests.support.cached_rows import assert_equal
from tests.support.family_cases import FamilyModel


@pytest.fixture
def model(family_model: Callable[[str], FamilyModel]) -> FamilyModel:
    return family_model("joyimage-edit")


@pytest.mark.parametrize("prompt", ["", "a red star", "a cat " * LENGTH])
def test_a_prompt_has_the_counted_tokens(model: FamilyModel, prompt: str) -> None:
    """They are the pipeline's, but for the end of one that is too long."""
    pixels, spec = model.edit(0).pixels, model.adapter.spec
    states = model.encoder.encode_prompt(prompt, [pixels])["prompt_embeds"]
    read = model.encoder.text_encoders["text_encoder"].read_of(prompt)
    assert (read.cut > 0) == (len(prompt) > LENGTH)
    assert read.used <= LENGTH
    height, width = (side // spec.vae_scale_factor for side in pixels.shape[:2])
    assert len(states) == spec.encoder_picture_tokens(height, width) + read.used
    [expected], _ = model.pipeline.encode_prompt_multiple_images(
        prompt, images=[Image.fromarray(pixels)]
    )
    assert len(expected) == len(states) + read.cut
    assert_equal(states, expected[: len(states)].detach().numpy())


def test_a_prompt_that_names_a_pictures_place_is_refused(model: FamilyModel) -> None:
    with pytest.raises(InvalidRequest, match="is where the model has a picture"):
        model.encoder.encode_prompt("a cat <|image_pad|>", [model.edit(0).pixels])


def test_the_time_isembed_times_in_float32_as_in_diffusers(model: FamilyModel) -> None:
    """In bfloat16; layers rounded to it give other vectors."""
    from diffusers import JoyImageEditTransformer3DModel

    denoiser = JoyImageEditTransformer3DModel.from_pretrained(
        model.folder / "transformer", torch_dtype=torch.bfloat16
    )
    embedder: Any = denoiser.condition_embedder
    assert embedder.time_embedder.linear_1.weight.dtype == torch.float32
    loaded: Any = load_adapter(config_of(model.folder, model={"dtype": "bfloat16"}))
    times = torch.rand(3, 2) * 1000
    with torch.inference_mode():
        words = torch.zeros(2, 1, embedder.text_embedder.linear_1.in_features)
        expected = torch.stack([embedder(time, words.bfloat16())[0] for time in times])
        actual = embed_times(loaded.weights, times)
        embedder.time_embedder.to(torch.bfloat16)
        rounded = torch.stack([embedder(time, words.bfloat16())[0] for time in times])
    expected, rounded = (F.silu(x).float() for x in (expected, rounded))
    apart = (actual.float() - expected).abs().max()
    assert 4 * apart <= (rounded - expected).abs().max()
    assert torch.equal(actual.float(), expected) or apart <= 2**-7 * expected.abs().max()


OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "positions of words": ("transformer", {"rope_type": "mrope"}, "rope_type: mrope"),
    "larger tokens": ("transformer", {"patch_size": [1, 4, 4]}, r"patch_size: \[1, 4, 4\]"),
    "Wan 2.2's VAE": ("vae", {"patch_size": 2}, "use Wan 2.1's"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_folders_of_other_layers_are_refused(tmp_path: Path, name: str) -> None:
    part, values, why = OTHERS[name]
    folder = FAMILIES["joyimage-edit"](tmp_path / "model")
    file = folder / part / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    with pytest.raises(ConfigError, match=why):
        load_spec(folder)
