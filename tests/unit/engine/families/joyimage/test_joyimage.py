"""The particulars of JoyImage-Edit: its prompts, and folders of other layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from maskserve_common.config import ConfigError
from maskserve_common.errors import InvalidRequest
from maskserve_engine.families.specs import load_spec
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
