"""Rows with anchors of their own against dense ones, and against diffusers' model whose attention
is given what two anchors foretell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from maskserve_benchmarks.steps.replay import Replay, plan_of_kinds
from maskserve_common.config import Config
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.packing import RowInput
from maskserve_engine.batch.step_cache import RefreshSchedule, StepCacheReader
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.flux.adapter import FluxAdapter
from maskserve_engine.families.mmdit.rows import FlowRow, Row, pass_inputs
from maskserve_engine.requests.refresh_schedules import (
    step_cache_bytes,
    step_cache_bytes_with_template,
)
from maskserve_engine.stages.latents import Posterior
from tests.fakes.jobs import config_of, encode_case, guided, random_case
from tests.fakes.pipelines import diffusers_latents
from tests.support.cached_rows import NOISE_SEED, Primed, assert_equal
from tests.support.lookahead_flux import LookaheadFlux
from tests.support.refresh_rows import assert_as_alone, computed, plan, result, row_of, run

pytestmark = pytest.mark.spread("folder", "seed")


@pytest.fixture(scope="module", params=["fill", "inpaint", "reference"])
def folder(request: pytest.FixtureRequest, tiny_flux: dict[str, Path]) -> Path:
    return tiny_flux[request.param]


@pytest.fixture(scope="module")
def config(folder: Path) -> Config:
    return config_of(folder, model={"outside_noise": "edit"})


def make_job(encoder: Encoder, seed: int, **settings: Any) -> EditJob:
    rng = np.random.default_rng(seed)
    if encoder.spec.true_cfg and seed % 2:
        settings = {**guided(rng), **settings}
    case = random_case(rng, **{"num_inference_steps": 7, "strength": 1.0, **settings})
    return encode_case(encoder, case, f"edit-{seed}")


@pytest.mark.parametrize("seed", range(2))
def test_with_all_tokens_active_and_the_text_computed_it_is_dense(
    adapter: FluxAdapter, encoder: Encoder, seed: int
) -> None:
    job = make_job(encoder, seed)
    job = replace(job, edit_mask=np.full_like(job.edit_mask, 255))
    # A context is never active: it stays what the anchors foretell.
    reference = adapter.spec.semantics.reference
    dense = range(7) if reference else (0, 3)
    latents = result(adapter, job, plan(*dense, text=False, lookahead=not reference))
    assert_equal(latents, result(adapter, job, None))


@pytest.mark.parametrize("text", [True, False])
def test_rows_do_not_depend_on_their_batch(
    adapter: FluxAdapter, encoder: Encoder, text: bool
) -> None:
    jobs = [make_job(encoder, seed, num_inference_steps=3 + seed) for seed in range(5)]
    plans = [plan(0, 2, text=text), None, plan(0, 3, 4, text=not text),
             plan(0, text=text), plan(0, 3, 5, text=text, ring=text)]  # fmt: skip

    def rows() -> list[Any]:
        return [row_of(adapter, job, schedule) for job, schedule in zip(jobs, plans, strict=True)]

    together = rows()
    run(adapter, together, plans)
    for row, schedule, neighbour in zip(rows(), plans, together, strict=True):
        run(adapter, [row], [schedule])
        assert_equal(neighbour.result().array(), row.result().array())


@pytest.mark.parametrize("left_out", ["text and ring", "text", "neither"])
@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_pipeline_whose_other_tokens_are_foretold(
    config: Config,
    adapter: FluxAdapter,
    encoder: Encoder,
    seed: int,
    left_out: str,
) -> None:
    from diffusers import DiffusionPipeline

    pipeline: Any = DiffusionPipeline.from_pretrained(config.model.path)
    pipeline.set_progress_bar_config(disable=True)
    case = random_case(np.random.default_rng(70 + seed), num_inference_steps=8, strength=1.0,
                       mask_ring=1)  # fmt: skip
    job = encode_case(encoder, case, "oracle")
    text, ring = "text" in left_out, "ring" in left_out
    anchors = ({0, 2}, {0, 3, 6}, {0, 2, 4})[seed]  # the last bend, and have steps behind them
    schedule = plan(*anchors, text=text, ring=ring)
    schedule = replace(schedule, power=(1.0, 3.0, 2.0)[seed], second_order=seed != 1)
    oracle = LookaheadFlux(pipeline, adapter, job, schedule)
    expected = diffusers_latents(pipeline, case)
    row = row_of(adapter, job, schedule)
    run(adapter, [row], [schedule])
    latents = row.result().array()
    parts = (computed(adapter.spec, job, x, leaves_ring=ring) for x in (latents, expected))
    assert_equal(*parts)
    errors = row.step_cache.errors.by_step()
    assert set(errors) == anchors - {0}
    assert errors == pytest.approx(oracle.errors(), rel=1e-3)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_a_format_is_near(adapter: FluxAdapter, encoder: Encoder, format: str) -> None:
    job = make_job(encoder, 5)
    exact = result(adapter, job, plan(0, 3))
    latents = result(adapter, job, plan(0, 3, format=format))
    assert 0 < np.abs(latents - exact).max() < (0.05 if format == "int8" else 0.8)


def hit(replay: Replay, job: EditJob, primed: Primed, text: RefreshSchedule | None) -> FlowRow:
    """A row that reads a template's entries."""
    cached_row = replay.adapter.cached_row(job, NOISE_SEED, text)
    assert isinstance(cached_row, FlowRow)
    entries = [min(primed.entries, key=lambda entry: abs(entry.anchor.sigma - sigma))
               for sigma, _ in replay.adapter.sigmas(job)]  # fmt: skip
    replay.reads(cached_row, entries)
    return cached_row


def run_hits(replay: Replay, rows: Sequence[FlowRow]) -> None:
    """All steps of rows of as many steps; each leaves its text out where it may."""
    while rows[0].step < rows[0].steps:
        for row in rows:
            row.leaves_out_text = (
                row.has_cached_text and row.step not in row.step_cache.schedule.dense
            )
        replay.step(rows, ("kv",) * replay.adapter.blocks)


def begun(
    replay: Replay, job: EditJob, primed: Primed, schedule: RefreshSchedule | None
) -> FlowRow:
    """As `hit`, with a dense first step."""
    row = hit(replay, job, primed, schedule)
    entries = replay.entries(row)
    replay.reads(row, (None, *entries[1:]))
    return row


class Seen:
    """A `packing.Capture` of the image tokens' keys and values, or of all."""

    def __init__(self, *, text: bool = False) -> None:
        self.text = text
        self.blocks: dict[int, tuple[Tensor, Tensor]] = {}

    def hidden(self, block: int, hidden: Tensor) -> None:
        """Nobody reads it."""

    def keys_values(self, block: int, keys: Tensor, values: Tensor) -> None:
        self.blocks[block] = keys.flatten(1).clone(), values.flatten(1).clone()


def watch(monkeypatch: pytest.MonkeyPatch, row: FlowRow, capture: Seen) -> None:
    """Let `capture` see the row's next steps."""

    def watched(other: Row) -> list[RowInput]:
        first, *seconds = pass_inputs(other)
        return [replace(first, capture=capture) if other is row else first, *seconds]

    monkeypatch.setattr("maskserve_engine.families.mmdit.batch.pass_inputs", watched)


@pytest.mark.parametrize(("text", "stride"), [(True, 3), (False, 1)])
def test_a_dense_first_step_lifts_what_a_template_has(
    adapter: FluxAdapter,
    encoder: Encoder,
    text: bool,
    stride: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where its first step has found more than the entry of the next one has, later steps read
    theirs with as much more, fading with the noise.
    """
    job, replay = make_job(encoder, 10 + stride), Replay(adapter)
    primed = Primed(adapter, encoder, job, stride=stride)
    refresh_schedule = RefreshSchedule(
        frozenset({0, 3} if text else ()), "model", text, corrects_residuals=True
    )
    row, plain, capture = (
        begun(replay, job, primed, refresh_schedule),
        begun(replay, job, primed, refresh_schedule),
        Seen(),
    )

    watch(monkeypatch, plain, capture)
    kinds = ("kv",) * adapter.blocks
    replay.step([plain], kinds)
    assert row.image.unmasked is not None
    count = len(row.image.unmasked.ids)
    entries = replay.entries(row)
    sigmas = [step.sigma for step in row.schedule.walk]
    while row.step < 6:
        row.leaves_out_text = row.has_cached_text and row.step not in refresh_schedule.dense
        replay.step([row], kinds)
        row.entry = replay.next_read(row)
        row_input, *_ = pass_inputs(row)
        *_, template_tokens = row_input.cached
        for block in (0, adapter.blocks - 1):
            entry, first = entries[row.step], entries[1]
            source = template_tokens.source(block)
            assert entry is not None
            assert first is not None
            of_template = entry.blocks[block].part("kv"), first.blocks[block].part("kv")
            [lift] = source.changes
            read_now = source.coded_parts(), lift.parts
            parts = zip(*read_now, capture.blocks[block], *of_template, strict=True)
            for part, slope, latents, of_now, of_first in parts:
                read = part.data + lift.weight * slope.data
                lacked = latents[-count:] - of_first.data[row.image.unmasked.ids]
                expected = (
                    of_now.data[row.image.unmasked.ids] + sigmas[row.step] / sigmas[0] * lacked
                )
                assert_equal(read.numpy(), expected.numpy())


def test_what_is_shown_of_a_row_on_its_way_has_the_source_outside_the_mask(
    adapter: FluxAdapter, encoder: Encoder
) -> None:
    """The ring, too, which is as noisy as the step until the last one is done."""
    job, schedule = make_job(encoder, 1, mask_ring=1), plan(0, 3, ring=True)
    row = row_of(adapter, job, schedule)
    reader, kinds = (
        StepCacheReader(row, adapter.entry_blocks),
        plan_of_kinds(("kv",) * adapter.blocks),
    )
    while row.step < 4:
        read: Any = None if row.step in schedule.dense else reader.entry_at(row.step)
        adapter.step([row], kinds if read else None, [read])
    preview, source = row.estimate().array(), Posterior(
        job.moments, adapter.spec.latents, torch.float32
    ).mode().numpy()  # fmt: skip
    gh, gw = row.image.grid
    at = np.zeros(gh * gw, bool)
    at[adapter.prepare(job).prepared.tokens.inner] = True
    inner = at.reshape(gh, gw).repeat(2, 0).repeat(2, 1)
    assert not inner.all()
    assert np.array_equal(preview[:, ~inner], source[:, ~inner])
    assert np.abs(preview - source)[:, inner].max() > 1e-2


def test_what_a_step_ahead_is_asked_with_is_where_the_last_answer_leads(
    adapter: FluxAdapter, encoder: Encoder
) -> None:
    """Nothing before the first step, which has no answer, and at the last, which has none ahead."""
    job = make_job(encoder, 2, num_inference_steps=4)
    row: Any = adapter.dense_row(job)
    for step in range(4):
        before, latents = row.latents.clone(), row.extrapolated_latents()
        assert (latents is None) == (step in (0, 3))
        if latents is not None and row.image.masked.blend is None:
            sigmas = row.schedule.sigmas
            velocity = row.sampler.moved / (sigmas[step] - sigmas[step - 1])
            expected = before + (sigmas[step + 1] - sigmas[step]) * velocity
            assert_equal(latents.numpy(), expected.numpy())
        adapter.step([row], None)


def test_what_is_booked_is_what_is_kept(adapter: FluxAdapter, encoder: Encoder) -> None:
    """To the byte, of floats: one anchor, the line through two, and how three bend it."""
    job = make_job(encoder, 1, mask_ring=1)
    for schedule in (
        plan(0),
        plan(0, 3),
        plan(0, 3, text=False),
        plan(0, 2, 4),
        plan(0, 2, 4, second_order=True),
        plan(0, 3, ring=True),
    ):
        row = row_of(adapter, job, schedule)
        run(adapter, [row], [schedule])
        nbytes = sum(cache.nbytes for cache in row.step_caches)
        assert nbytes == step_cache_bytes(schedule, adapter, job), schedule


def test_what_is_booked_beside_a_template_is_what_is_kept(
    adapter: FluxAdapter, encoder: Encoder
) -> None:
    job, replay = make_job(encoder, 1, mask_ring=1), Replay(adapter)
    primed = Primed(adapter, encoder, job)
    lifts = RefreshSchedule(frozenset(), "model", text=False, corrects_residuals=True)
    for schedule in (
        plan(0, 3),
        plan(0, 2, 4, ring=True),
        replace(plan(0, 3), corrects_residuals=True),
        lifts,
    ):
        row = begun(replay, job, primed, schedule)
        run_hits(replay, [row])
        nbytes = sum(cache.nbytes for cache in row.step_caches)
        assert nbytes == step_cache_bytes_with_template(schedule, adapter, job), schedule


def test_rows_whose_first_step_lifts_entries_do_not_depend_on_their_batch(
    adapter: FluxAdapter, encoder: Encoder
) -> None:
    jobs, replay = [make_job(encoder, seed) for seed in range(20, 24)], Replay(adapter)
    lifts = RefreshSchedule(frozenset(), "int8", text=False, corrects_residuals=True)
    ahead = plan(0, 3, ring=True, format="int8")
    plans = [replace(ahead, corrects_residuals=True), None, lifts, plan(0, 4)]
    primed = [Primed(adapter, encoder, job, stride=2) for job in jobs]

    def alone(number: int, schedule: RefreshSchedule | None) -> Any:
        row = begun(replay, jobs[number], primed[number], schedule)
        run_hits(replay, [row])
        return row.result().array()

    together = [begun(replay, *parts) for parts in zip(jobs, primed, plans, strict=True)]
    run_hits(replay, together)
    assert_as_alone(together, plans, alone)
    assert np.abs(alone(2, None) - alone(2, lifts)).max() > 1e-3


@pytest.mark.parametrize("seed", range(2))
def test_text_that_is_computed_at_each_step_beside_a_template_changes_nothing(
    adapter: FluxAdapter, encoder: Encoder, seed: int
) -> None:
    job, replay = make_job(encoder, seed), Replay(adapter)
    primed = Primed(adapter, encoder, job)
    every = plan(*range(7), lookahead=False)
    plain, refreshed = (hit(replay, job, primed, text) for text in (None, every))
    for row in (plain, refreshed):
        run_hits(replay, [row])
    assert_equal(refreshed.result().array(), plain.result().array())


def test_rows_that_leave_the_text_out_beside_a_template_do_not_depend_on_their_batch(
    adapter: FluxAdapter, encoder: Encoder
) -> None:
    jobs, replay = [make_job(encoder, seed) for seed in range(4)], Replay(adapter)
    plans = [
        plan(0, 3, ring=True),
        None,
        plan(0, 2, 5),
        plan(0, 4),
    ]
    primed = [Primed(adapter, encoder, job) for job in jobs]

    def rows() -> list[FlowRow]:
        return [hit(replay, *parts) for parts in zip(jobs, primed, plans, strict=True)]

    together, alone = rows(), rows()
    run_hits(replay, together)
    for row, neighbour in zip(alone, together, strict=True):
        run_hits(replay, [row])
        assert_equal(neighbour.result().array(), row.result().array())


@pytest.mark.parametrize("seed", range(2))
def test_a_ring_that_is_computed_at_each_step_is_one_that_is_not_left_out(
    adapter: FluxAdapter, encoder: Encoder, seed: int
) -> None:
    job, replay = make_job(encoder, seed, mask_ring=2), Replay(adapter)
    primed = Primed(adapter, encoder, job)
    wide = job.with_settings(mask_ring=max(2, adapter.spec.refresh.ring or 0))
    plain, refreshed = (
        hit(replay, wide, primed, None),
        hit(replay, job, primed, plan(*range(7), ring=True, lookahead=False)),
    )
    for row in (plain, refreshed):
        run_hits(replay, [row])
    assert refreshed.image.ring is not None
    assert len(refreshed.latents) + len(refreshed.image.ring.ids) == len(plain.latents)
    assert_equal(refreshed.result().array(), plain.result().array())


@pytest.mark.parametrize("ring", [True, False])
def test_what_is_foreseen_beside_a_template_is_what_a_row_has_that_is_there(
    adapter: FluxAdapter, encoder: Encoder, ring: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of text and ring are those of a row that reads the template and lies, at the
    anchor's step, where its last answer leads.
    """
    job, replay = make_job(encoder, 8, mask_ring=2), Replay(adapter)
    primed, capture = Primed(adapter, encoder, job, stride=7), Seen(text=True)
    schedule = plan(0, 4, ring=ring)
    row = hit(replay, job, primed, schedule)
    kinds = ("kv",) * adapter.blocks
    replay.step([row], kinds)
    wide = job.with_settings(mask_ring=max(2, adapter.spec.refresh.ring or 0)) if ring else job
    arrived = hit(replay, wide, primed, None)
    assert arrived.image.unmasked is not None
    assert row.image.unmasked is not None
    change = row.schedule.walk[1:4]
    way = sum(step.change for step in change) / row.schedule.walk[0].change
    assert row.sampler.moved is not None
    ids, latents = row.image.masked.ids, row.latents + way * row.sampler.moved
    if row.image.ring is not None:
        around = row.image.ring.latents.at(
            row.schedule.sigmas[4], sum(step.change for step in change)
        )
        ids = torch.cat((ids, row.image.ring.ids))
        latents = torch.cat((latents, around[:, : row.channels]))
    if row.image.masked.blend is not None:
        latents[: len(row.latents)] = row.image.masked.blend.apply(
            latents[: len(row.latents)], row.schedule.sigmas[4], 4, row.steps
        )
    order = torch.argsort(ids)
    assert_equal(ids[order].numpy(), arrived.image.masked.ids.numpy())
    arrived.image.masked.latents, arrived.step = latents[order], 4

    watch(monkeypatch, arrived, capture)
    replay.step([arrived], kinds)
    row.leaves_out_text = row.has_cached_text
    replay.step([row], kinds)
    assert row.step_cache is not None
    words, active = len(row.prompt.text), len(row.latents)
    places = torch.cat((torch.arange(words), words + torch.argsort(order)[active:]))
    for block in range(adapter.blocks):
        parts = row.step_cache.source(block, row.walk_sigma()).parts
        for part, expected in zip(parts, capture.blocks[block], strict=True):
            assert_equal(part.data.numpy(), expected[places].numpy())


@pytest.mark.parametrize("ring", [True, False])
def test_what_is_left_out_beside_a_template_lies_on_its_line(
    adapter: FluxAdapter, encoder: Encoder, ring: bool
) -> None:
    """Attention of a step that leaves text and ring out is that of one whose keys and values of
    these are what two anchors foretell; the ring's latents go on by what moved them there.
    """
    job, replay = make_job(encoder, 0), Replay(adapter)
    row = hit(replay, job, Primed(adapter, encoder, job), plan(0, 2, ring=ring, lookahead=False))
    count, latents, snapshots = (
        0 if row.image.ring is None else len(row.image.ring),
        list[Tensor](),
        list[Any](),
    )
    while row.step < 4:
        row.leaves_out_text = row.step not in (0, 2)
        if row.image.ring is not None and not row.leaves_out_text:
            latents.append(row.image.ring.latents.latents_now.clone())
        replay.step([row], ("kv",) * adapter.blocks)
        if row.step in (1, 3):
            latents.append(
                latents if row.image.ring is None else row.image.ring.latents.latents_now.clone()
            )
            snapshots.append(row.step_cache.source(0, row.walk_sigma()).parts[0].data.clone())
    step_cache, words = row.step_cache, len(row.prompt.text)
    assert step_cache is not None
    row.leaves_out_text = True
    model_input, *_ = pass_inputs(row)
    assert not len(model_input.text)
    left_out, _ = model_input.cached
    source = left_out.source(0, "kv")
    sigmas = [step.sigma for step in row.schedule.walk]
    times = (sigmas[2] - sigmas[4]) / (sigmas[0] - sigmas[2])
    [along] = source.changes
    assert along.weight == pytest.approx(times)
    assert len(source.parts[0].data) == words + count == len(left_out.cis)
    assert_equal(along.parts[0].data.numpy(), (snapshots[1] - snapshots[0]).numpy())
    if row.image.ring is None:
        return
    assert len(model_input.tokens) == len(row.latents)
    begin, after, at, then = latents
    changes = [sigmas[1] - sigmas[0], sigmas[3] - sigmas[2], sigmas[4] - sigmas[3]]
    before, last = (after - begin) / changes[0], (then - at) / changes[1]
    t = (sigmas[2] - sigmas[3]) / (sigmas[0] - sigmas[2])
    expected = then + changes[2] * (last + t * (last - before))
    if row.image.ring.latents.blend is None:
        assert_equal(row.image.ring.latents.latents_now.numpy(), expected.numpy())
