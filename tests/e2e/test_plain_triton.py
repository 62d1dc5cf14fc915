"""A tritonserver without our supervisor serves edits, as docs/deploy.md says: those of
diffusers' own pipeline, of a model with inpainting semantics.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskserve_common.config import ModelConfig
from maskserve_common.config_file import config_of
from maskserve_common.contracts.settings import EditSettings
from tests.fakes.pictures import blob_mask, scene
from tests.fakes.pipelines import diffusers_edit
from tests.fakes.tiny_model import VAE_FACTOR
from tests.support.calls import (
    Grpc,
    InferenceServerException,
    Pixels,
    edit_inputs,
    pixels,
    plain_edit,
)
from tests.support.plain_triton import PlainWorker

SIDE = 64
SOURCE = scene(SIDE, SIDE)
# Of whole latents: others are grown to them, where the pipeline takes the nearest pixel.
MASK = np.kron(
    blob_mask(SIDE // VAE_FACTOR, SIDE // VAE_FACTOR), np.ones((VAE_FACTOR,) * 2, np.uint8)
)
ASKED = (
    {"seed": 3},
    {"seed": 4, "strength": 0.6, "num_inference_steps": 5, "guidance_scale": 7.5},
    {"seed": 5, "negative_prompt": "blue circle", "true_cfg_scale": 3.0},
    {"seed": 6, "negative_prompt": "", "true_cfg_scale": 1.5, "strength": 0.8},
)


@pytest.fixture
def client(plain_worker: PlainWorker) -> Iterator[Grpc]:
    with closing(Grpc(plain_worker.grpc_url)) as grpc:
        yield grpc


@pytest.fixture(scope="module")
def pipeline(tiny_inpaint: Path) -> Any:
    from diffusers import FluxInpaintPipeline

    loaded = FluxInpaintPipeline.from_pretrained(tiny_inpaint)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def diffusers_picture(pipeline: Any, model: ModelConfig, options: dict[str, Any]) -> Pixels:
    defaults = {
        "num_inference_steps": model.num_inference_steps,
        "guidance_scale": model.guidance_scale,
    }
    settings = EditSettings(**{**defaults, **options})
    length, seed = model.max_sequence_length, options["seed"]
    images = diffusers_edit(
        pipeline, SOURCE, MASK, "a red star", settings, seed, max_sequence_length=length
    )
    return np.asarray(images[0])


def test_edits_are_those_of_the_pipeline_and_spare_the_outside(
    client: Grpc, pipeline: Any, tiny_inpaint: Path
) -> None:
    """All at once, so that rows with and without a negative prompt share a batch."""
    settings = {"num_inference_steps": 4, "cache": "off"}
    inputs = [edit_inputs(SOURCE, MASK, **{**settings, **overrides}) for overrides in ASKED]
    pending = [client.begin(request_inputs) for request_inputs in inputs]
    edit, model = MASK > 0, config_of({"model": {"path": str(tiny_inpaint)}}).model
    for overrides, answer in zip(ASKED, pending, strict=True):
        image, meta = answer.wait(120)
        edited, expected = pixels(image), diffusers_picture(pipeline, model, overrides)
        assert np.array_equal(edited[~edit], SOURCE[~edit])
        difference = np.abs(edited[edit].astype(int) - expected[edit])
        assert difference.max() <= 1, overrides  # a level: rounding at another batch shape
        assert np.abs(edited[edit].astype(int) - SOURCE[edit]).max() > 8
        assert meta["seed"] == overrides["seed"]


def test_a_cached_edit_takes_a_negative_prompt(client: Grpc) -> None:
    settings = {"num_inference_steps": 4, "cache": "require"}
    plain, meta = client.edit(plain_edit(SIDE, SIDE, **settings))
    guided_settings = {**settings, "negative_prompt": "blue circle", "true_cfg_scale": 3.0}
    led, led_meta = client.edit(plain_edit(SIDE, SIDE, **guided_settings))
    assert meta["cache"] == led_meta["cache"] == "hit"
    assert led_meta["active_tokens"] == meta["active_tokens"] < meta["total_tokens"]
    assert led != plain
    repeat_image, _ = client.edit(plain_edit(SIDE, SIDE, **guided_settings))
    assert repeat_image == led


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"negative_prompt": "blue"}, "SETTINGS.negative_prompt"),
        ({"true_cfg_scale": 2.0}, "SETTINGS.true_cfg_scale"),
    ],
)
def test_half_of_a_pair_is_refused(client: Grpc, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InferenceServerException, match=rf"\[INVALID_REQUEST\] {field}: has no"):
        client.edit(plain_edit(SIDE, SIDE, **options))
