"""Rows of FLUX with ControlNets and anchors of their own against diffusers' pipeline, both of whose
models are called once more where an anchor is foreseen.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers import FluxControlNetInpaintPipeline
from PIL import Image

from maskserve_engine.base.job import ControlInput, EditJob
from maskserve_engine.batch.step_cache import RefreshSchedule
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.flux.adapter import FluxAdapter
from maskserve_engine.families.mmdit.rows import Row, lookahead_inputs
from maskserve_engine.families.registry import load_adapter, load_encoder
from tests.fakes.control_nets import random_net
from tests.fakes.jobs import config_of, encode_case, random_case, tolerance
from tests.fakes.pipelines import diffusers_latents
from tests.support.lookahead_flux import LookaheadFlux
from tests.support.refresh_rows import plan, run

NET = random_net(31, 1, 2)


@pytest.fixture(scope="module")
def adapter(tiny_inpaint: Path) -> FluxAdapter:
    adapter = load_adapter(config_of(tiny_inpaint, model={"outside_noise": "edit"}))
    assert isinstance(adapter, FluxAdapter)
    return adapter


@pytest.fixture(scope="module")
def encoder(tiny_inpaint: Path) -> Encoder:
    return load_encoder(config_of(tiny_inpaint))


def result(adapter: FluxAdapter, job: EditJob, schedule: RefreshSchedule) -> Any:
    """[C, h, w] latents of what a row computes between its anchors."""
    row: Any = adapter.refreshing_row(job, schedule)
    adapter.control(row, job, {"net": adapter.control_net(NET)})
    run(adapter, [row], [schedule])
    return computed(adapter, job, row.result().array())


def computed(adapter: FluxAdapter, job: EditJob, latents: Any) -> Any:
    _, height, width = latents.shape
    active = np.zeros((height // 2) * (width // 2), bool)
    active[adapter.prepare(job).prepared.tokens.active] = True
    return latents[:, active.reshape(height // 2, width // 2).repeat(2, 0).repeat(2, 1)]


@pytest.mark.parametrize("text", [True, False])
def test_it_is_the_pipeline_whose_nets_foresee(
    tiny_inpaint: Path,
    adapter: FluxAdapter,
    encoder: Encoder,
    monkeypatch: pytest.MonkeyPatch,
    text: bool,
) -> None:
    """A row whose foreseen pass is without its net is another."""
    rng = np.random.default_rng(90 + text)
    case = random_case(rng, num_inference_steps=8, strength=1.0, mask_ring=1)
    mask = case.mask.copy()
    mask[8:24, 8:24] = 255
    case = replace(case, mask=mask)
    picture = rng.integers(0, 256, case.pixels.shape, dtype=np.uint8)
    moments = encoder.encode(picture, case.mask, "").moments
    control = ControlInput("net", picture, scale=0.8, moments=moments)
    job = replace(encode_case(encoder, case, "oracle"), controls=(control,))
    schedule = replace(plan(0, 3, 6, text=text), power=1.5)
    pipeline: Any = FluxControlNetInpaintPipeline.from_pretrained(tiny_inpaint, controlnet=NET)
    pipeline.set_progress_bar_config(disable=True)
    forward, processors = NET.forward, NET.attn_processors
    try:
        LookaheadFlux(pipeline, adapter, job, schedule)
        expected = diffusers_latents(
            pipeline,
            case,
            control_image=Image.fromarray(picture),
            control_mode=-1,
            controlnet_conditioning_scale=0.8,
        )
    finally:
        NET.forward = forward
        NET.set_attn_processor(processors)
    expected = computed(adapter, job, expected)
    latents = result(adapter, job, schedule)
    assert np.abs(latents - expected).max() <= tolerance(expected)

    def without(row: Row) -> Any:
        return [replace(row_input, residuals=None) for row_input in lookahead_inputs(row)]

    monkeypatch.setattr("maskserve_engine.families.mmdit.batch.lookahead_inputs", without)
    assert np.abs(result(adapter, job, schedule) - expected).max() > 2 * tolerance(expected)
