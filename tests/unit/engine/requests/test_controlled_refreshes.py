"""Edits of models without tuned places of refresh steps: their errors place them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.mmdit.batch import FlowBatch
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.layers import keep_tokens
from maskserve_engine.loop.engine import Engine
from maskserve_engine.planning.refresh_control import RefreshControl, tolerance_of
from maskserve_engine.requests.refresh_schedules import RefreshSchedules
from maskserve_engine.scheduling.step_scheduler import Ticket
from tests.fakes.jobs import config_of, tolerance
from tests.support.draws import fresh_seed
from tests.support.engines import edit, job, make_engine
from tests.support.eventually import eventually
from tests.support.refresh_rows import plan, result, row_of, run, schedule_by_errors
from tests.support.sink import Sink

STEPS = 20
LOW, HIGH = 8.0, 100.0
"""Fidelities at which a model with random weights refreshes seldom, and cannot often enough."""


@pytest.fixture(scope="module")
def encoder(tiny_kontext: Path) -> Encoder:
    return load_encoder(config_of(tiny_kontext))


@pytest.fixture
def engine(
    tiny_kontext: Path, encoder: Encoder, request: pytest.FixtureRequest
) -> Iterator[Engine]:
    fidelity = getattr(request, "param", LOW)
    engine = make_engine(tiny_kontext, encoder, own_anchors=-1.0, fidelity=fidelity)
    yield engine
    engine.close(5.0)
    assert not engine.manager.edits


@pytest.mark.parametrize("engine", [LOW, 14.0, 20.0], indirect=True)
def test_its_errors_place_an_edits_refresh_steps(engine: Engine, encoder: Encoder) -> None:
    edit_job = job(encoder, fresh_seed(), "first", num_inference_steps=STEPS)
    final = edit(engine, edit_job)
    schedule = schedule_by_errors(engine.config, engine.adapter, edit_job, final.meta)
    assert final.meta["cache"] == "own"
    assert final.meta["anchors"] == sorted(schedule.computed_at)
    assert final.meta["dense_steps"] == len(schedule.refresh_steps)
    assert set(final.meta["refresh_errors"]) == {
        str(step) for step in schedule.refresh_steps - schedule.dense
    }
    # As if the row had known the places from the start.
    expected = result(engine.adapter, edit_job, schedule)
    np.testing.assert_allclose(final.latents, expected, atol=tolerance(expected))


@pytest.mark.parametrize("engine", [HIGH], indirect=True)
def test_where_no_refresh_step_is_near_enough_the_rest_is_dense(
    engine: Engine, encoder: Encoder
) -> None:
    edit_job = job(encoder, fresh_seed(), "dense", num_inference_steps=STEPS)
    meta = edit(engine, edit_job).meta
    [first] = map(int, meta["refresh_errors"])
    assert meta["dense_for"] == "error"
    assert meta["anchors"] == [0, 1, *range(first + 1, STEPS)]


@pytest.mark.parametrize("engine", [0.0], indirect=True)
@pytest.mark.parametrize("floor", [LOW, 14.0])
def test_an_edit_may_ask_for_a_fidelity(engine: Engine, encoder: Encoder, floor: float) -> None:
    """It then reads no template, since nothing measures what that keeps."""
    seed, steps = fresh_seed(), {"num_inference_steps": STEPS}
    edit(engine, job(encoder, seed, "primes", cache="require", **steps))
    assert edit(engine, job(encoder, seed, "hit", **steps)).meta["cache"] == "hit"
    edit_job = job(encoder, seed, "promised", reuse_floor=floor, **steps)
    final = edit(engine, edit_job)
    schedule = schedule_by_errors(engine.config, engine.adapter, edit_job, final.meta)
    assert schedule.control is not None
    assert schedule.control.tolerance == tolerance_of(floor)
    assert (final.meta["cache"], final.meta["reuse_floor"]) == ("own", floor)
    assert final.meta["anchors"] == sorted(schedule.computed_at)


@pytest.mark.parametrize("model", ["inpaint", "sd-fill", "sdxl-base"])
def test_models_with_known_places_keep_the_fidelity_that_an_edit_asks_for(
    tiny_flux: dict[str, Path], tiny_unets: dict[str, Path], model: str
) -> None:
    folder = (tiny_flux | tiny_unets)[model]
    encoder = load_encoder(config_of(folder))
    engine = make_engine(folder, encoder, own_anchors=-1.0)
    try:
        edit_job = job(
            encoder, fresh_seed(), "promised", num_inference_steps=STEPS, reuse_floor=LOW
        )
        final = edit(engine, edit_job)
        schedule = schedule_by_errors(engine.config, engine.adapter, edit_job, final.meta)
        expected = result(engine.adapter, edit_job, schedule)
    finally:
        engine.close(5.0)
    assert (final.meta["cache"], final.meta["reuse_floor"]) == ("own", LOW)
    assert final.meta["anchors"] == sorted(schedule.computed_at)
    np.testing.assert_allclose(final.latents, expected, atol=tolerance(expected))


def test_where_no_error_is_seen_an_edit_that_asks_for_a_fidelity_is_dense(
    tiny_inpaint: Path,
) -> None:
    encoder = load_encoder(config_of(tiny_inpaint))
    engine = make_engine(tiny_inpaint, encoder, own_anchors=0.0)
    try:
        meta = edit(engine, job(encoder, fresh_seed(), "dense", num_inference_steps=STEPS,
                                reuse_floor=LOW)).meta  # fmt: skip
    finally:
        engine.close(5.0)
    assert meta["cache"] == "miss"
    assert meta["computed_tokens"] == STEPS * meta["total_tokens"]


def test_errors_are_those_of_the_guided_answers(
    tiny_inpaint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both passes count: with the prompt's alone, an edit's error would not see the other."""
    encoder, adapter = load_encoder(config_of(tiny_inpaint)), load_adapter(config_of(tiny_inpaint))
    guided, guide = list[torch.Tensor](), FlowBatch.guide

    def recorded(positive: torch.Tensor, negative: torch.Tensor, scale: float) -> None:
        guided.append(negative + scale * (positive - negative))
        guide(positive, negative, scale)

    monkeypatch.setattr(FlowBatch, "guide", staticmethod(recorded))
    edit_job = job(encoder, fresh_seed(), "guided", num_inference_steps=8,
                   negative_prompt="a dog", true_cfg_scale=4.0)  # fmt: skip
    schedule = plan(0, 4)
    row = row_of(adapter, edit_job, schedule)
    run(adapter, [row], [schedule])
    ahead, answer = guided[2], guided[5]  # step 1 has both passes of the lookahead, too
    expected = float((answer - ahead[: len(answer)]).norm() / answer.norm())
    assert row.step_cache.errors.by_step() == {4: pytest.approx(expected, rel=1e-3)}


@pytest.mark.parametrize(
    ("engine", "floor"), [(0.0, None), (LOW, 100.0)], indirect=["engine"], ids=["none", "all"]
)
def test_without_a_fidelity_or_with_all_of_it_edits_are_dense(
    engine: Engine, encoder: Encoder, floor: float | None
) -> None:
    settings = {"num_inference_steps": STEPS, "reuse_floor": floor}
    edit_job = job(encoder, fresh_seed(), "dense", **settings)
    final = edit(engine, edit_job)
    assert final.meta["cache"] == "miss"
    np.testing.assert_array_equal(final.latents, result(engine.adapter, edit_job, None))


def test_a_step_cache_that_begins_anew_is_not_held_to_the_end(
    engine: Engine, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory ends until no refresh step is left."""
    executor, encode, last = cast(Any, engine.executor), keep_tokens.encode, STEPS - 3

    def scarce(x: Any, format: str) -> Any:
        [record] = executor.rows.values()
        if 0 < record.row.step <= last:
            raise torch.OutOfMemoryError("no memory for refresh steps")
        return encode(x, format)

    monkeypatch.setattr(keep_tokens, "encode", scarce)
    meta = edit(engine, job(encoder, fresh_seed(), "anew", num_inference_steps=STEPS)).meta
    assert meta["dense_for"] == "memory"
    assert meta["anchors"] == list(range(STEPS))


def test_its_places_do_not_depend_on_its_batch(engine: Engine, encoder: Encoder) -> None:
    jobs = [
        job(encoder, fresh_seed(), f"edit-{n}", num_inference_steps=STEPS + 4 * n) for n in range(3)
    ]
    alone = [edit(engine, edit_job) for edit_job in jobs]
    sinks = [Sink() for _ in jobs]
    for edit_job, sink in zip(jobs, sinks, strict=True):
        request = replace(edit_job.request, request_id=f"{edit_job.request.request_id}-again")
        engine.submit(replace(edit_job, request=request), sink)
    for before, sink in zip(alone, sinks, strict=True):
        final = sink.final()
        assert final.meta["anchors"] == before.meta["anchors"]
        np.testing.assert_allclose(final.latents, before.latents, atol=tolerance(before.latents))
    eventually("the edits have left", lambda: not engine.manager.edits)
    engine.cache.check_integrity()


@pytest.mark.parametrize("engine", [LOW, 20.0, HIGH], indirect=True)
def test_it_is_never_priced_above_a_dense_edit(engine: Engine, encoder: Encoder) -> None:
    edit_job = job(encoder, fresh_seed(), "priced", num_inference_steps=STEPS)
    prices, sink = list[float](), Sink()
    engine.submit(edit_job, sink)

    def price() -> bool:
        edits = list(engine.ask(lambda: [(e.flops, e.work) for e in engine.manager.edits.values()])
                     .result())  # fmt: skip
        prices.extend(flops / work.without_schedule().step_flops("dense") for flops, work in edits)
        return not edits

    eventually("the edit has ended", price)
    assert all(price <= 1.0 + 1e-9 for price in prices)
    sink.final()


@pytest.mark.parametrize("engine", [LOW, 14.0, 20.0, HIGH], indirect=True)
def test_after_its_last_error_its_ticket_has_the_tokens_of_its_steps_left(
    engine: Engine, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    repriced, scheduler = list[tuple[int, int, Ticket]](), engine.manager.scheduler
    reprice = scheduler.reprice

    def recorded(ticket: Ticket, fewer: int = 0) -> None:
        reprice(ticket, fewer)
        [row], [state] = scheduler.running, engine.manager.edits.values()
        repriced.append((state.tally.done, state.tally.computed_tokens, row))

    monkeypatch.setattr(scheduler, "reprice", recorded)
    meta = edit(engine, job(encoder, fresh_seed(), "priced", num_inference_steps=STEPS)).meta
    done, tokens, row = repriced[-1]
    left = STEPS - done
    assert (meta["computed_tokens"] - tokens) / left == pytest.approx(row.active_tokens, abs=0.6)
    assert row.steps == STEPS
    assert len(repriced) == len([step for step in meta["refresh_errors"] if int(step) < STEPS - 1])


@pytest.mark.parametrize(
    ("engine", "promised"), [(LOW, LOW), (-1.0, 40.0)], indirect=["engine"], ids=["set", "default"]
)
def test_the_tolerance_is_that_of_the_promise(
    engine: Engine, encoder: Encoder, promised: float
) -> None:
    edit_job = job(encoder, 1, "first", num_inference_steps=STEPS)
    schedule = RefreshSchedules(engine.config, engine.adapter).of(edit_job)
    assert schedule is not None
    assert isinstance(schedule.control, RefreshControl)
    assert schedule.control.tolerance == tolerance_of(promised)


def test_without_room_for_its_step_cache_it_is_dense_and_says_so(
    engine: Engine, encoder: Encoder
) -> None:
    edit_job = job(encoder, fresh_seed(), "dense", num_inference_steps=STEPS)
    engine.cache.store.memory.budget_bytes = 1
    final = edit(engine, edit_job)
    assert (final.meta["cache"], final.meta["dense_for"]) == ("miss", "memory")
    np.testing.assert_array_equal(final.latents, result(engine.adapter, edit_job, None))
