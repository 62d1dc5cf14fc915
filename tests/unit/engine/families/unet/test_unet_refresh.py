"""Rows of UNets with anchors of their own against dense ones, and against diffusers' pipelines
whose UNet is given what two anchors foretell.
"""

from __future__ import annotations

from dataclasses import replace
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
from tests.support.lookahead_unet import Ahead, LookaheadUnet
from tests.support.refresh_rows import computed, plan, result, row_of, run

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


def make_case(seed: int, **settings: Any) -> Case:
    """An edit of a small random mask; sides that are odd at some level."""
    rng = np.random.default_rng(seed)
    case = unet_case(rng, **{"num_inference_steps": 7, "strength": 1.0, **settings})
    mask = np.zeros(SIDE, np.uint8)
    top, left = (int(rng.integers(0, n // 2)) for n in SIDE)
    mask[top : top + int(rng.integers(4, 24)), left : left + int(rng.integers(4, 24))] = 255
    pixels = rng.integers(0, 256, (*SIDE, 3), dtype=np.uint8)
    return replace(case, pixels=pixels, mask=mask)


def make_job(encoder: Encoder, seed: int, **settings: Any) -> EditJob:
    return encode_case(encoder, make_case(seed, **settings), f"edit-{seed}")


@pytest.mark.parametrize("halo", [0, ALL])
def test_with_all_tokens_active_it_is_dense(folder: Path, encoder: Encoder, halo: int) -> None:
    adapter, job = adapter_of(folder, halo), make_job(encoder, 2)
    job = replace(job, edit_mask=np.full_like(job.edit_mask, 255))
    dense = result(adapter, job, None)
    assert_equal(result(adapter, job, plan(0, 3)), dense)


def test_rows_do_not_depend_on_their_batch(adapter: UnetAdapter, encoder: Encoder) -> None:
    jobs = [make_job(encoder, seed, num_inference_steps=4 + seed) for seed in range(6)]
    plans = [plan(0, 2), None, plan(0, 3, 4), plan(0, 2), plan(0, 3, 5), plan(0)]
    together = [row_of(adapter, job, schedule) for job, schedule in zip(jobs, plans, strict=True)]
    run(adapter, together, plans)
    for job, schedule, neighbour in zip(jobs, plans, together, strict=True):
        assert_equal(neighbour.result().array(), result(adapter, job, schedule))


@pytest.mark.parametrize(("halo", "seed", "bends"), [(0, 0, False), (2, 1, False), (ALL, 2, True)])
def test_it_is_the_pipeline_whose_others_are_foretold(
    folder: Path, encoder: Encoder, halo: int, seed: int, bends: bool
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
    prepared = adapter.prepare(job).prepared
    active, blend = prepared.active.levels, prepared.inputs.start.blend
    inside = None if blend is None else blend.mask[0] > 0
    ahead = Ahead(pipeline.scheduler, {1: 4, 4: 6}, case.settings.guidance_scale, inside)
    size = job.moments.shape[1:]
    oracle = LookaheadUnet(pipeline.unet, active, {0}, halo or 1, size, ahead, second_order=bends)
    expected = diffusers_edit(pipeline, case.pixels, case.mask, case.prompt, case.settings,
                              case.seed, output_type="latent")[0].numpy()  # fmt: skip
    mine = plan(0, 4, 6, second_order=bends)
    row = row_of(adapter, job, mine)
    run(adapter, [row], [mine])
    latents, errors = row.result().array(), row.step_caches[0].errors.by_step()
    assert_equal(computed(adapter.spec, job, latents), computed(adapter.spec, job, expected))
    assert set(errors) == {4, 6}
    assert errors == pytest.approx(oracle.errors, rel=1e-3)
    off = np.abs(computed(adapter.spec, job, latents - expected)).max()
    rivals = [replace(mine, power=3.0), plan(0, 4, 6, second_order=bends, lookahead=False)]
    for rival in [*rivals, *([replace(mine, second_order=False)] if bends else [])]:
        maximum = np.abs(computed(adapter.spec, job, result(adapter, job, rival) - expected)).max()
        assert maximum > 10 * off, rival


def test_what_was_foreseen_without_an_adapter_is_forgotten_with_it(
    adapter: UnetAdapter, encoder: Encoder
) -> None:
    job = make_job(encoder, 8)
    row = row_of(adapter, job, plan(0, 3))
    reader = StepCacheReader(row, adapter.entry_blocks)
    adapter.step([row], None, [None])
    assert reader.entry_at(1) is not None
    adapter.attach(row, job, ())
    assert reader.entry_at(1) is None


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_a_format_is_near(adapter: UnetAdapter, encoder: Encoder, format: str) -> None:
    job = make_job(encoder, 5)
    exact = result(adapter, job, plan(0, 3))
    latents = result(adapter, job, plan(0, 3, format=format))
    assert 0 < np.abs(latents - exact).max() < (0.05 if format == "int8" else 0.8)


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
    """The part that a row computes once, from SDXL's sizes, is counted at each step."""
    job, schedule, rows = make_job(encoder, 6, guidance_scale=guidance), plan(0), []
    once = counted(lambda: rows.append(row_of(adapter, job, schedule)))
    adapter.step(rows, None)
    entry: Any = StepCacheReader(rows[0], adapter.entry_blocks).entry_at(1)
    kinds = ("kv",) * adapter.blocks
    flops = once + counted(lambda: adapter.step(rows, plan_of_kinds(kinds), [entry]))
    work = adapter.work(*job.moments.shape[1:])
    assert flops == work.batch_flops(adapter.totals(job, schedule), kinds, None)


@pytest.mark.parametrize("schedule", [plan(0, 2), plan(0, 3, 5, second_order=True)])
def test_what_is_booked_is_what_is_held(
    adapter: UnetAdapter, encoder: Encoder, schedule: RefreshSchedule
) -> None:
    """At most: rings and answers lie three and two times there, once two anchors are taken."""
    job, schedule = make_job(encoder, 7, guidance_scale=7.5), replace(schedule, text=False)
    row = row_of(adapter, job, schedule)
    run(adapter, [row], [schedule])
    total = sum(anchor.nbytes for anchor in row.step_caches)
    booked = step_cache_bytes(schedule, adapter, job)
    assert total < booked == total + adapter.refreshing_row_bytes(job)
