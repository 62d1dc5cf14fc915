"""Rows of UNets with anchors of their own against dense ones, and against diffusers' pipelines
whose UNet is given what two anchors foretell.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskserve_benchmarks.steps.replay import plan_of_kinds
from maskserve_common.config import Config
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.step_cache import RefreshSchedule, StepCacheReader
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.families.unet.adapter import UnetAdapter
from maskserve_engine.requests.refresh_schedules import step_cache_bytes
from tests.fakes.jobs import Case, config_of, encode_case, unet_case
from tests.fakes.pipelines import diffusers_edit
from tests.fakes.tiny_unet import EACH_SORT
from tests.support.cached_rows import assert_equal
from tests.support.flop_count import counted
from tests.support.foretold_unet import Ahead, ForetoldUnet
from tests.support.own_rows import plan, result, row_of, run

pytestmark = pytest.mark.spread("folder")

SIDE = (72, 88)
ALL = 64
"""A halo over any picture here."""


@pytest.fixture(scope="module", params=EACH_SORT)
def folder(request: pytest.FixtureRequest, tiny_unets: dict[str, Path]) -> Path:
    return tiny_unets[request.param]


def config_with(folder: Path, halo: int) -> Config:
    return config_of(folder, model={"outside_noise": "edit"}, cache={"conv_halo": halo})


def adapter_of(folder: Path, halo: int = 0) -> UnetAdapter:
    adapter = load_adapter(config_with(folder, halo))
    assert isinstance(adapter, UnetAdapter)
    return adapter


@pytest.fixture(scope="module")
def adapter(folder: Path) -> UnetAdapter:
    return adapter_of(folder)


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    return load_encoder(config_of(folder))


def make_case(seed: int, **asked: Any) -> Case:
    """An edit of a small random mask; sides that are odd at some level."""
    rng = np.random.default_rng(seed)
    case = unet_case(rng, **{"num_inference_steps": 7, "strength": 1.0, **asked})
    mask = np.zeros(SIDE, np.uint8)
    top, left = (int(rng.integers(0, n // 2)) for n in SIDE)
    mask[top : top + int(rng.integers(4, 24)), left : left + int(rng.integers(4, 24))] = 255
    pixels = rng.integers(0, 256, (*SIDE, 3), dtype=np.uint8)
    return replace(case, pixels=pixels, mask=mask)


def make_job(encoder: Encoder, seed: int, **asked: Any) -> EditJob:
    return encode_case(encoder, make_case(seed, **asked), f"edit-{seed}")


def computed(adapter: UnetAdapter, job: EditJob, latents: Any) -> Any:
    """Of [C, h, w] latents those of the tokens that a step between anchors computes."""
    return latents.reshape(len(latents), -1)[:, adapter.prepare(job).prepared.active.levels[0]]


@pytest.mark.parametrize("guidance", [1.0, 7.5])
def test_with_an_anchor_at_each_step_it_is_dense(
    adapter: UnetAdapter, encoder: Encoder, guidance: float
) -> None:
    job = make_job(encoder, int(guidance), guidance_scale=guidance, mask_ring=1)
    own = result(adapter, job, plan(*range(adapter.steps(job))))
    assert_equal(computed(adapter, job, own), computed(adapter, job, result(adapter, job, None)))


@pytest.mark.parametrize("halo", [0, ALL])
def test_with_all_tokens_active_it_is_dense(folder: Path, encoder: Encoder, halo: int) -> None:
    adapter, job = adapter_of(folder, halo), make_job(encoder, 2)
    job = replace(job, edit_mask=np.full_like(job.edit_mask, 255))
    dense = result(adapter, job, None)
    for foresees in (False, True):
        assert_equal(result(adapter, job, plan(0, 3, foresees=foresees)), dense)


def test_rows_do_not_depend_on_their_batch(adapter: UnetAdapter, encoder: Encoder) -> None:
    jobs = [make_job(encoder, seed, num_inference_steps=4 + seed) for seed in range(6)]
    ahead = partial(plan, foresees=True)
    plans = [plan(0, 2), None, ahead(0, 3, 4), ahead(0, 2), ahead(0, 3, 5), plan(0)]
    together = [row_of(adapter, job, own) for job, own in zip(jobs, plans, strict=True)]
    run(adapter, together, plans)
    for job, own, beside in zip(jobs, plans, together, strict=True):
        assert_equal(beside.result().array(), result(adapter, job, own))


@pytest.mark.parametrize(
    ("halo", "seed", "foresees", "bends"),
    [(0, 0, False, False), (2, 1, False, False), (ALL, 2, True, True), (0, 3, True, False)],
)
def test_it_is_the_pipeline_whose_others_are_foretold(
    folder: Path, encoder: Encoder, halo: int, seed: int, foresees: bool, bends: bool
) -> None:
    """Between anchors tokens and maps outside lie on lines, from which tokens may bend; a row that
    holds them is far off.
    """
    from diffusers import StableDiffusionInpaintPipeline, StableDiffusionXLInpaintPipeline

    xl = (folder / "text_encoder_2").exists()
    cls: Any = StableDiffusionXLInpaintPipeline if xl else StableDiffusionInpaintPipeline
    pipeline = cls.from_pretrained(folder, **({} if xl else {"safety_checker": None}))
    pipeline.set_progress_bar_config(disable=True)
    adapter = adapter_of(folder, halo)
    case = make_case(40 + seed, num_inference_steps=8, mask_ring=seed % 2,
                     guidance_scale=(1.0, 7.5)[seed % 2])  # fmt: skip
    job = encode_case(encoder, case, "oracle")
    dense = {0, 3, 6} if seed else {0, 2}
    prepared = adapter.prepare(job).prepared
    active, blend, ahead, own = prepared.active.levels, prepared.inputs.start.blend, None, plan
    if foresees:
        steps, dense, own = {1: 4, 4: 6}, {0}, partial(plan, 4, 6, foresees=True, bends=bends)
        inside = None if blend is None else blend.mask[0] > 0
        ahead = Ahead(pipeline.scheduler, steps, case.settings.guidance_scale, inside)
    size = job.moments.shape[1:]
    ForetoldUnet(pipeline.unet, active, dense, halo or 1, size, ahead, bends=bends)
    expected = diffusers_edit(pipeline, case.pixels, case.mask, case.prompt, case.settings,
                              case.seed, output_type="latent")[0].numpy()  # fmt: skip
    found = result(adapter, job, own(*dense))
    assert_equal(computed(adapter, job, found), computed(adapter, job, expected))
    mine, off = own(*dense), np.abs(computed(adapter, job, found - expected)).max()
    rivals = [replace(mine, power=0.0), replace(mine, looks_ahead=not foresees)]
    for rival in [*rivals, *([replace(mine, second_order=False)] if bends else [])]:
        maximum = np.abs(computed(adapter, job, result(adapter, job, rival) - expected)).max()
        assert maximum > 10 * off, rival


def test_what_was_foreseen_without_an_adapter_is_forgotten_with_it(
    adapter: UnetAdapter, encoder: Encoder
) -> None:
    job = make_job(encoder, 8)
    for foresees in (True, False):
        row = row_of(adapter, job, plan(0, 3, foresees=foresees))
        reader = StepCacheReader(row, adapter.entry_blocks)
        adapter.step([row], None, [None])
        assert reader.turn_to(1) is not None
        adapter.attach(row, job, ())
        assert (reader.turn_to(1) is None) == foresees


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_a_format_is_near(adapter: UnetAdapter, encoder: Encoder, format: str) -> None:
    job = make_job(encoder, 5)
    exact = result(adapter, job, plan(0, 3))
    found = result(adapter, job, plan(0, 3, format=format))
    assert 0 < np.abs(found - exact).max() < (0.05 if format == "int8" else 0.8)


def test_a_format_has_no_tokens_where_a_level_has_no_others(
    adapter: UnetAdapter, encoder: Encoder
) -> None:
    job = make_job(encoder, 5, mask_ring=0)
    mask = np.zeros_like(job.edit_mask)
    mask[::16, ::16] = 255  # in each token of the coarsest level
    job = replace(job, edit_mask=mask)
    active = adapter.prepare(job).prepared.active.levels
    assert len(active[max(active)]) == adapter.work(*job.moments.shape[1:]).tokens[-1]
    assert np.isfinite(result(adapter, job, plan(0, 3, format="int8"))).all()


@pytest.mark.parametrize("guidance", [1.0, 7.5])
def test_what_is_counted_of_a_step_is_what_torch_counts(
    adapter: UnetAdapter, encoder: Encoder, guidance: float
) -> None:
    """What a row computes once, of SDXL's sizes, is counted at each step."""
    job, own, rows = make_job(encoder, 6, guidance_scale=guidance), plan(0), []
    once = counted(lambda: rows.append(row_of(adapter, job, own)))
    adapter.step(rows, None)
    entry: Any = StepCacheReader(rows[0], adapter.entry_blocks).turn_to(1)
    kinds = ("kv",) * adapter.blocks
    found = once + counted(lambda: adapter.step(rows, plan_of_kinds(kinds), [entry]))
    work = adapter.work(*job.moments.shape[1:])
    assert found == work.batch_flops(adapter.counted(job, own), kinds, None)


@pytest.mark.parametrize("own", [plan(0, 2), plan(0, 3, 5, foresees=True, bends=True)])
def test_what_is_booked_is_what_is_held(
    adapter: UnetAdapter, encoder: Encoder, own: RefreshSchedule
) -> None:
    """At most: rings and answers lie three and two times there, once two anchors are taken."""
    job, own = make_job(encoder, 7, guidance_scale=7.5), replace(own, text=False)
    row = row_of(adapter, job, own)
    run(adapter, [row], [own])
    total = sum(anchor.nbytes for anchor in row.anchors)
    booked = step_cache_bytes(own, adapter, job, "float32")
    assert total < booked == total + adapter.anchored_bytes(job)
