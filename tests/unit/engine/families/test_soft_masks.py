"""Masks with grey (`mask_mode: strength`): differential diffusion, row by row.

The oracle is diffusers' pipeline, to which a callback after each step gives back what the next one
may not change yet; families whose pipeline blends are compared likewise in their own tests.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxFillPipeline, FluxInpaintPipeline, StableDiffusionInpaintPipeline

from maskserve_common.contracts.settings import EditSettings
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.stages.latents import joins
from tests.fakes.jobs import config_of, encode_case, random_case, tolerance, unet_case
from tests.fakes.pipelines import diffusers_edit, diffusers_latents

pytestmark = pytest.mark.spread("seed")

CELL = 8
"""Pixels of a grey: no less than a token's."""


def greys(rng: np.random.Generator, size: tuple[int, ...]) -> Any:
    """uint8 [H, W]: a third is black, the rest of random grey or white, in cells."""
    cells = rng.integers(1, 300, [side // CELL for side in size]).clip(0, 255)
    cells[rng.random(cells.shape) < 0.3] = 0
    cells.flat[0] = 128  # some grey in any case
    return np.repeat(np.repeat(cells.astype(np.uint8), CELL, 0), CELL, 1)


def binary(grey: Any) -> Any:
    return np.where(grey > 0, np.uint8(255), np.uint8(0))


def grey_of_latents(grey: Any, factor: int) -> torch.Tensor:
    """[1, h, w] of latents: of the pixels under each the largest."""
    h, w = (side // factor for side in grey.shape)
    return torch.from_numpy(grey.reshape(h, factor, w, factor).max(axis=(1, 3)).astype(int))[None]


class Thresholds:
    """`callback_on_step_end`: of the latents those whose time has not come are the noised source.

    Args:
        grey: int, as the latents are.
        clean: the source.
        noise: the edit's.
    """

    def __init__(self, grey: torch.Tensor, clean: torch.Tensor, noise: torch.Tensor) -> None:
        self._grey, self._clean, self._noise = grey, clean, noise

    def __call__(self, pipeline: Any, step: int, _: Any, now: dict[str, Any]) -> dict[str, Any]:
        scheduler, run = pipeline.scheduler, len(pipeline.scheduler.timesteps)
        if (begin := getattr(scheduler, "begin_index", None)) is not None:
            run -= begin
        source, later = self._clean, scheduler.timesteps[-run:][step + 1 : step + 2]
        if len(later):
            noised = getattr(scheduler, "scale_noise", None)
            if noised is not None:
                source = noised(self._clean[None], later, self._noise[None])[0]
            else:
                source = scheduler.add_noise(self._clean[None], self._noise[None], later)[0]
        # What the next step may change; behind the last one, what it has changed.
        may = self._grey * run >= 255 * max(run - step - 1, 1)
        return {"latents": torch.where(may, now["latents"][0], source)[None]}


def result_of(adapter: Any, row: Any) -> Any:
    while row.step < row.steps:
        adapter.step([row], None)
    return row.result().array()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", ["fill", "inpaint"])
def test_flux_is_the_pipeline_held_back_under_grey(
    tiny_fill: Path, tiny_inpaint: Path, family: str, seed: int
) -> None:
    folder, cls = (
        (tiny_fill, FluxFillPipeline) if family == "fill" else (tiny_inpaint, FluxInpaintPipeline)
    )
    pipeline: Any = cls.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    config = config_of(folder, model={"outside_noise": "edit"})  # as the pipeline has it
    encoder, adapter = load_encoder(config), load_adapter(config)
    rng = np.random.default_rng(7300 + seed)
    case = random_case(rng, num_inference_steps=int(rng.integers(3, 7)))
    soft = replace(case, mask=greys(rng, case.mask.shape))
    row: Any = adapter.dense_row(encode_case(encoder, soft, "soft"))
    assert row.image.masked.blend is not None
    channels, factor = row.image.masked.blend.clean.shape[1] // 4, pipeline.vae_scale_factor
    grey = grey_of_latents(soft.mask, factor).expand(channels, -1, -1)
    packed = pipeline._pack_latents(grey[None].contiguous(), 1, *grey.shape)[0]
    thresholds = Thresholds(packed, row.image.masked.blend.clean, row.image.masked.blend.noise)
    whole = replace(case, mask=binary(soft.mask))
    expected = diffusers_latents(pipeline, whole, callback_on_step_end=thresholds)
    assert np.abs(result_of(adapter, row) - expected).max() <= tolerance(expected)
    plain = diffusers_latents(pipeline, whole)
    assert np.abs(plain - expected).max() > 10 * tolerance(expected)


@pytest.mark.parametrize("seed", range(2))
def test_an_inpainting_unet_is_the_pipeline_held_back_under_grey(
    tiny_unets: dict[str, Path], seed: int
) -> None:
    folder = tiny_unets["sd-fill"]
    pipeline: Any = StableDiffusionInpaintPipeline.from_pretrained(folder, safety_checker=None)
    pipeline.set_progress_bar_config(disable=True)
    encoder, adapter = load_encoder(config_of(folder)), load_adapter(config_of(folder))
    rng = np.random.default_rng(7400 + seed)
    case = unet_case(rng, strength=1.0)
    soft = replace(case, mask=greys(rng, case.mask.shape))
    whole = replace(case, mask=binary(soft.mask))
    row: Any = adapter.dense_row(encode_case(encoder, soft, "soft"))
    grey = grey_of_latents(soft.mask, soft.mask.shape[0] // row.blend.clean.shape[1])
    thresholds = Thresholds(grey, row.blend.clean, row.blend.noise)
    arguments = (whole.pixels, whole.mask, whole.prompt, whole.settings, whole.seed)
    [expected] = diffusers_edit(
        pipeline, *arguments, output_type="latent", callback_on_step_end=thresholds
    ).numpy()
    assert np.abs(result_of(adapter, row) - expected).max() <= tolerance(expected)
    [plain] = diffusers_edit(pipeline, *arguments, output_type="latent").numpy()
    assert np.abs(plain - expected).max() > 10 * tolerance(expected)


def test_what_may_change_by_half_is_edited_in_the_last_half() -> None:
    assert [joins(index, 4) for index in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.25]
    assert EditSettings(mask_mode="strength").mask_mode == "strength"
