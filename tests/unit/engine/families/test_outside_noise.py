"""Models that blend the source in: an edit's noise is its own under the mask and its template's
elsewhere, but for `cache: off`, which is the pipeline's own picture (design §4).

The oracle is diffusers' pipeline, given that noise as `latents`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    FluxInpaintPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionXLInpaintPipeline,
)

from maskserve_engine.batch.transfer import HostCopy
from maskserve_engine.families.mmdit.rows import FlowRow
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.requests.audits import Audit
from tests.fakes.jobs import config_of, encode_case, guided, random_case, tolerance, unet_case
from tests.fakes.pipelines import diffusers_edit, diffusers_latents
from tests.fakes.tiny_unet import VARIANTS

pytestmark = pytest.mark.spread("seed")

BASE_UNETS = [name for name in VARIANTS if "base" in name]


def _drawn(generator: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn((1, *shape), generator=generator)


def _pipeline_noise(job: Any, channels: int) -> torch.Tensor:
    """[1, C, h, w], said again by itself: the image's sample is drawn before the noise."""
    shape = (channels, *job.moments.shape[1:])
    manual_seed = torch.Generator("cpu").manual_seed(job.request.seed)
    _drawn(manual_seed, shape)
    noise = _drawn(manual_seed, shape)
    seed = int(job.request.pixels_id[:12], 16)
    outside = _drawn(torch.Generator("cpu").manual_seed(seed), shape)
    side = job.edit_mask.shape[0] // shape[1]
    under = torch.from_numpy(job.edit_mask[::side, ::side] > 127)
    return torch.where(under, noise, outside)


def _alone(adapter: Any, row: Any) -> Any:
    while row.step < row.steps:
        adapter.step([row], None)
    return row.result().array()


@pytest.mark.parametrize("seed", range(4))
def test_a_flux_row_equals_the_pipeline_given_its_noise(tiny_inpaint: Path, seed: int) -> None:
    pipeline: Any = FluxInpaintPipeline.from_pretrained(tiny_inpaint)
    pipeline.set_progress_bar_config(disable=True)
    encoder, adapter = load_encoder(config_of(tiny_inpaint)), load_adapter(config_of(tiny_inpaint))
    rng = np.random.default_rng(7000 + seed)
    case = random_case(rng, strength=1.0, **(guided(rng) if seed % 2 else {}))
    job = encode_case(encoder, case, "r")
    noise = _pipeline_noise(job, job.moments.shape[0] // 2)
    expected = diffusers_latents(pipeline, case, latents=noise)
    row = adapter.dense_row(job)
    assert np.abs(_alone(adapter, row) - expected).max() <= tolerance(expected)
    assert np.abs(diffusers_latents(pipeline, case) - expected).max() > tolerance(expected)


@pytest.mark.parametrize("variant", BASE_UNETS)
@pytest.mark.parametrize("seed", range(2))
def test_a_unet_row_equals_the_pipeline_given_its_noise(
    tiny_unets: dict[str, Path], variant: str, seed: int
) -> None:
    folder = tiny_unets[variant]
    xl = (folder / "text_encoder_2").exists()
    pipeline: Any = (
        StableDiffusionXLInpaintPipeline.from_pretrained(folder)
        if xl
        else StableDiffusionInpaintPipeline.from_pretrained(folder, safety_checker=None)
    )
    pipeline.set_progress_bar_config(disable=True)
    encoder, adapter = load_encoder(config_of(folder)), load_adapter(config_of(folder))
    case = unet_case(np.random.default_rng(7100 + seed), strength=1.0)
    job = encode_case(encoder, case, "r")
    noise = _pipeline_noise(job, job.moments.shape[0] // 2)
    images = diffusers_edit(
        pipeline, case.pixels, case.mask, case.prompt, case.settings, case.seed,
        output_type="latent", latents=noise,
    )  # fmt: skip
    expected = images[0].numpy()
    row = adapter.dense_row(job)
    assert np.abs(_alone(adapter, row) - expected).max() <= tolerance(expected)


@pytest.mark.parametrize("strength", [1.0, 0.6])
def test_rows_dense_and_cached_have_one_noise_outside_the_mask(
    tiny_inpaint: Path, strength: float
) -> None:
    config = config_of(tiny_inpaint)
    encoder, adapter = load_encoder(config), load_adapter(config)
    case = random_case(np.random.default_rng(7200), strength=strength, num_inference_steps=5)
    job = encode_case(encoder, case, "r")
    other = replace(job, request=replace(job.request, seed=job.request.seed + 1))
    first, second = (adapter.dense_row(edit) for edit in (job, other))
    cached = adapter.cached_row(job, job.request.template_noise_seed)
    index, blend = cached.image.unmasked.ids, first.image.masked.blend
    assert torch.equal(blend.noise[index], cached.image.unmasked.latents.noise)
    under = blend.mask > 0
    assert torch.equal(blend.noise[~under], second.image.masked.blend.noise[~under])
    assert not torch.equal(blend.noise[under], second.image.masked.blend.noise[under])


@pytest.mark.parametrize(
    ("noise", "cached", "cache", "shared"),
    [
        ("auto", True, "auto", True),
        ("auto", True, "require", True),
        ("auto", True, "own", True),
        ("auto", True, "off", False),
        ("auto", False, "auto", False),
        ("template", True, "off", True),
        ("template", False, "auto", True),
        ("edit", True, "auto", False),
    ],
)
@pytest.mark.parametrize("family", ["flux", "sdxl-base"])
def test_configuration_and_edit_say_whose_noise_lies_outside(
    tiny_inpaint: Path,
    tiny_unets: dict[str, Path],
    family: str,
    noise: str,
    cached: bool,
    cache: str,
    shared: bool,
) -> None:
    folder = tiny_inpaint if family == "flux" else tiny_unets[family]
    config = config_of(folder, model={"outside_noise": noise}, cache={"enabled": cached})
    encoder, adapter = load_encoder(config), load_adapter(config)
    edit = random_case(np.random.default_rng(7300), cache=cache, strength=1.0)
    job = encode_case(encoder, edit, "r")
    other = replace(job, request=replace(job.request, seed=job.request.seed + 1))
    first, second = (_blend(adapter.dense_row(edit)) for edit in (job, other))
    outside = (first.mask == 0).expand_as(first.noise)
    assert torch.equal(first.noise[outside], second.noise[outside]) == shared


def test_an_edit_that_is_made_again_for_its_drift_keeps_its_noise(tiny_inpaint: Path) -> None:
    """An audit's dense row is compared with the cached one."""
    config = config_of(tiny_inpaint)
    encoder, adapter = load_encoder(config), load_adapter(config)
    job = encode_case(encoder, random_case(np.random.default_rng(7400), strength=1.0), "r")
    latents = HostCopy(torch.zeros(1))
    again = Audit("key", job, latents).dense_job()
    first, second = (_blend(adapter.dense_row(edit)) for edit in (job, again))
    assert torch.equal(first.noise, second.noise)


def _blend(row: Any) -> Any:
    """The blend of a row of either kind of model."""
    return row.image.masked.blend if isinstance(row, FlowRow) else row.blend
