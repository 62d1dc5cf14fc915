"""Due times: by setting or size, the order of the queue, refusals at once, and what META says."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from maskserve_common.config import SloConfig
from maskserve_common.contracts.due_times import SLO_OUTCOMES, due_by_size, slo_outcome
from maskserve_common.contracts.pricing import Pricing
from maskserve_common.contracts.reuse_levels import LEVELS, ReuseLevel, levels_of
from maskserve_common.contracts.semantics import FILL
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.errors import CODES, DeadlineExceeded, Overloaded
from maskserve_common.routing import Edit, WorkerView
from maskserve_engine.base.job import EditJob, Failed
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.registry import load_encoder
from maskserve_engine.loop.engine import Engine
from maskserve_engine.requests.due_times import DueTimes
from maskserve_engine.requests.execution_plan import EditWork, ExecutionPlan
from maskserve_engine.requests.refresh_schedules import RefreshSchedules
from maskserve_engine.requests.state import RequestState
from maskserve_engine.scheduling.step_scheduler import StepScheduler, Ticket
from maskserve_triton.after_steps import AfterSteps
from maskserve_triton.call import limited_request
from tests.fakes.jobs import config_of
from tests.support.engines import edit, job, make_engine, priced_by_flops
from tests.support.sink import Sink


@pytest.fixture(scope="module")
def encoder(tiny_fill: Path) -> Encoder:
    return load_encoder(config_of(tiny_fill))


@pytest.fixture
def engine(tiny_fill: Path, encoder: Encoder) -> Any:
    engine = make_engine(tiny_fill, encoder)
    yield engine
    engine.close(5.0)
    assert len(engine.manager.scheduler) == 0


def judge_by(engine: Engine, due_times: DueTimes) -> None:
    """Have edits judged so: all that ask hold the same object."""
    vars(engine.manager.due_times).update(vars(due_times))


def due(edit_job: EditJob, **request: Any) -> EditJob:
    return replace(
        edit_job, request=replace(edit_job.request, accepted_ns=time.time_ns(), **request)
    )


def dropped(edit_job: EditJob, ms: int, **request: Any) -> EditJob:
    """Due after so long, and dropped then."""
    settings = structs.replace(edit_job.request.settings, deadline_ms=ms)
    return due(edit_job, settings=settings, due_ms=ms, **request)


@pytest.mark.parametrize(
    ("pixels", "ms"),
    [(1, 1500), (256**2, 1500), (256**2 + 1, 2000), (512**2, 2000), (1024**2, 3000),
     (1024**2 + 1, 5000), (4096**2, 5000)],
)  # fmt: skip
def test_an_edit_is_due_by_its_size(pixels: int, ms: int) -> None:
    assert due_by_size(SloConfig(enabled=True).times_ms, pixels) == ms
    assert due_by_size(SloConfig().times_ms, pixels) is None


def test_every_end_but_the_clients_own_doing_is_a_hit_or_a_miss() -> None:
    assert (slo_outcome("OK", 0.0), slo_outcome("OK", -0.001)) == ("met", "late")
    outcomes = {code: slo_outcome(code, 1.0) for code in CODES}
    assert {code for code, outcome in outcomes.items() if outcome is None} == {
        "CANCELLED", "INVALID_REQUEST", "TEMPLATE_NOT_FOUND", "ADAPTER_NOT_FOUND", "REFUSED",
    }  # fmt: skip
    assert {"met", "late"} | {o for o in outcomes.values() if o} == set(SLO_OUTCOMES)


@pytest.mark.parametrize(
    ("ms", "on_late", "timeout_ms", "limit", "name", "expected_due"),
    [
        (None, "drop", 0, None, "SETTINGS.deadline_ms", None),
        (900, "drop", 0, 900, "SETTINGS.deadline_ms", 900),
        (900, "finish", 0, None, "SETTINGS.deadline_ms", 900),
        (900, "drop", 500, 500, "timeout", 500),
        (900, "finish", 500, 500, "timeout", 500),
        (900, "finish", 2000, 2000, "timeout", 900),
        (None, "finish", 500, 500, "timeout", 500),
    ],
)
def test_on_late_leaves_the_timeout_of_a_request_as_it_is(
    ms: int | None,
    on_late: Any,
    timeout_ms: int,
    limit: int | None,
    name: str,
    expected_due: int | None,
) -> None:
    request = SimpleNamespace(timeout=lambda: 1000 * timeout_ms)
    limits = limited_request(
        EditSettings(deadline_ms=ms, on_late=on_late), request, streaming=False
    )
    assert (limits.settings.deadline_ms, limits.limit_name, limits.due_ms) == (
        limit,
        name,
        expected_due,
    )


def test_what_follows_the_last_step_is_learned_per_token() -> None:
    after_steps = AfterSteps()
    assert after_steps.per_token_s == 0.0
    after_steps.learn({"event": "final"}, 1.0)
    assert after_steps.per_token_s == 0.0
    drawn = random.Random(3)
    for _ in range(40):
        tokens = drawn.choice((16, 256, 4096))
        timings = {"preprocess": 10.0, "encode": 20.0, "prepare": 5.0, "queue": 15.0}
        meta = {"total_tokens": tokens, "timings_ms": {**timings, "denoise": 50.0, "decode": 9.0}}
        after_steps.learn(meta, 0.1 + 1e-4 * tokens)
    after_steps.learn(
        {"total_tokens": 16, "timings_ms": {"denoise": 0.0}}, 60.0
    )  # one that was held up
    assert after_steps.per_token_s == pytest.approx(1e-4)


def test_the_queue_is_ordered_by_when_the_last_step_is_to_end() -> None:
    """Not by when the edit would be dropped, which one that goes on never is."""
    scheduler = StepScheduler(1, 8)
    for name, deadline, due_s in (
        ("free", None, None), ("tight", 9.0, 5.0), ("soft", None, 4.0), ("loose", 6.0, None),
    ):  # fmt: skip
        scheduler.submit(Ticket(name, 1, 4, 4, 0.0, deadline=deadline, due=due_s))
    assert [t.request_id for t in scheduler.waiting] == ["soft", "tight", "loose", "free"]
    decision = scheduler.schedule(7.0)
    assert [t.request_id for t in decision.expired] == ["loose"]
    scheduler.check_integrity()


def test_a_late_edit_goes_on_and_says_when_it_was_due(engine: Engine, encoder: Encoder) -> None:
    meta = edit(engine, due(job(encoder, 1, "late", num_inference_steps=4), due_ms=1)).meta
    assert (meta["due_ms"], meta["steps"]) == (1, 4)
    assert "due_ms" not in edit(engine, job(encoder, 1, "free", num_inference_steps=4)).meta


def test_without_a_setting_it_is_due_by_its_size(engine: Engine, encoder: Encoder) -> None:
    edit_job = due(job(encoder, 2, "sized"))
    times = SloConfig(enabled=True).times_ms
    state = RequestState.of(engine.prepared(edit_job), Sink(), engine.adapter, times)
    assert (state.due_ms, state.deadline) == (1500, None)
    with_due_ms = RequestState.of(
        engine.prepared(due(edit_job, due_ms=70)), Sink(), engine.adapter, times
    )
    assert with_due_ms.due_ms == 70


def test_the_last_step_is_due_before_the_answer(engine: Engine, encoder: Encoder) -> None:
    edit_job = due(job(encoder, 3, "tail"), due_ms=2000, after_token_s=0.01)
    state = RequestState.of(engine.prepared(edit_job), Sink(), engine.adapter)
    accepted = time.monotonic() - (time.time_ns() - edit_job.request.accepted_ns) / 1e9
    expected = accepted + 2.0 - 0.01 * state.work.total_tokens
    assert state.due == pytest.approx(expected, abs=0.02)
    assert state.make_ticket().due == state.due
    assert state.status().due_ns == int(1e9 * state.due)


def test_what_can_never_be_in_time_is_refused_with_the_time_that_it_takes(
    engine: Engine, encoder: Encoder
) -> None:
    judge_by(engine, DueTimes(engine.config, lambda: Pricing(1.0, 1.0, 1.0, 0.0)))
    sink, soft = Sink(), Sink()
    edit_job = job(encoder, 4, "never", num_inference_steps=4, cache="off")
    engine.submit(dropped(edit_job, 1000), sink)
    error = sink.error()
    assert isinstance(error, DeadlineExceeded)
    assert "SETTINGS.deadline_ms: 1000 ms are too short for this edit" in str(error)
    assert "about 8000 ms" in str(error)
    engine.submit(due(job(encoder, 4, "soft", num_inference_steps=4), due_ms=1000), soft)
    assert soft.final().meta["due_ms"] == 1000  # its client wants it whenever it comes
    after = Sink()
    short_job = job(encoder, 4, "decoding", num_inference_steps=1, cache="off")
    engine.submit(dropped(short_job, 60_000, after_token_s=100.0), after)
    assert isinstance(after.error(), DeadlineExceeded)


def test_what_cannot_be_in_time_now_is_refused_while_others_run(
    engine: Engine, encoder: Encoder
) -> None:
    # A batch of rows costs what each costs: 1 s for each of them in a step.
    judge_by(engine, DueTimes(engine.config, lambda: Pricing(0.0, 1.0, 1.0, 0.0)))
    sinks = [Sink() for _ in range(4)]
    refused, accepted = Sink(), Sink()

    def at_once() -> None:
        for number, sink in enumerate(sinks):
            edit_job = job(encoder, number, f"busy-{number}", num_inference_steps=4, cache="off")
            engine.manager.accept(RequestState.of(engine.prepared(edit_job), sink, engine.adapter))
        engine.manager.schedule()  # they have rows
        for name, ms, sink in (("no", 6000, refused), ("yes", 30_000, accepted)):
            edit_job = job(encoder, 9, name, num_inference_steps=4, cache="off")
            engine.manager.accept(
                RequestState.of(engine.prepared(dropped(edit_job, ms)), sink, engine.adapter)
            )

    engine.ask(at_once).result()
    error = refused.error()
    assert isinstance(error, Overloaded)
    assert "would be done in about 20.0 s" in str(error)
    assert accepted.final().meta["due_ms"] == 30_000
    for sink in sinks:
        sink.final()


def active_alone(engine: Engine) -> None:
    """A dense row costs 1 s in a step, a cached one 0.1 s."""
    judge_by(engine, DueTimes(engine.config, lambda: Pricing(0.0, 1.0, 0.1, 0.0)))


@pytest.mark.parametrize(
    ("ms", "cache"),
    [
        (60_000, "miss"),  # in time as it is
        (13_000, "hit"),
        (2_000, "miss"),  # late in any case
        (None, "miss"),
    ],
)
def test_an_edit_waits_for_its_template_where_only_that_meets_its_due_time(
    engine: Engine, encoder: Encoder, ms: int | None, cache: str
) -> None:
    """16 dense steps of 1 s, or 4 that prime and 16 of 0.1 s."""
    active_alone(engine)
    edit_job = small(job(encoder, 11, "due", num_inference_steps=16))
    final = edit(engine, due(edit_job, due_ms=ms))
    assert final.meta["cache"] == cache
    if cache == "hit":
        settings = structs.replace(edit_job.request.settings, cache="require")
        request = replace(edit_job.request, settings=settings, request_id="asked")
        assert np.array_equal(
            final.latents, edit(engine, replace(edit_job, request=request)).latents
        )


def test_an_edit_that_waited_in_vain_runs_dense(engine: Engine, encoder: Encoder) -> None:
    """Its template does not fit, or there is no prompt to prime it with."""
    active_alone(engine)
    dense = edit(engine, small(job(encoder, 11, "off", num_inference_steps=16, cache="off")))
    edit_job = small(job(encoder, 11, "due", num_inference_steps=16))
    engine.cache.prompt = lambda: None
    final = edit(engine, due(edit_job, due_ms=13_000))
    assert (final.meta["cache"], final.meta["steps"]) == ("miss", 16)
    assert np.array_equal(final.latents, dense.latents)


def small(edit_job: EditJob) -> EditJob:
    """With a mask of one token."""
    mask = np.zeros_like(edit_job.edit_mask)
    mask[5, 7] = 255
    return replace(edit_job, edit_mask=mask)


def elastic(edit_job: EditJob, floor: float, **request: Any) -> EditJob:
    settings = structs.replace(edit_job.request.settings, reuse="elastic", reuse_floor=floor)
    return due(edit_job, settings=settings, **request)


@pytest.mark.parametrize(
    ("ms", "floor", "level"),
    [
        (60_000, 0.0, None),  # 16 steps of 1 s
        (10_000, 0.0, "dense-interval2"),
        (5_000, 0.0, "dense-interval5"),
        (5_000, 40.0, "dense-interval4"),  # as far as the floor lets it
        (5_000, 60.0, None),
    ],
)
def test_an_elastic_edit_at_risk_predicts_steps_down_to_its_floor(
    engine: Engine, encoder: Encoder, ms: int, floor: float, level: str | None
) -> None:
    options: dict[str, Any] = {"num_inference_steps": 16, "cache": "off"}
    plain = edit(engine, job(encoder, 6, "plain", **options))
    judge_by(engine, DueTimes(engine.config, lambda: Pricing(0.0, 1.0, 1.0, 0.0)))
    final = edit(engine, elastic(job(encoder, 6, "elastic", **options), floor, due_ms=ms))
    assert final.meta.get("reuse", {}).get("level") == level
    if level is None:
        assert final.meta["steps_skipped"] == 0
        assert np.array_equal(final.latents, plain.latents)
        return
    (reuse_level,) = [entry for entry in LEVELS[FILL, "dense"] if entry.name == level]
    assert final.meta["reuse"]["psnr"] == reuse_level.psnr
    assert final.meta["reuse"]["steps_skipped"] == final.meta["steps_skipped"]
    interval = reuse_level.step_interval
    same = edit(engine, job(encoder, 6, "said", step_interval=interval, **options))
    assert np.array_equal(final.latents, same.latents)
    for name in ("steps", "steps_skipped", "computed_tokens"):
        assert final.meta[name] == same.meta[name]


@pytest.mark.parametrize("level", LEVELS[FILL, "cached"], ids=lambda level: level.name)
def test_a_cached_elastic_edit_has_the_ring_and_the_steps_of_its_level(
    engine: Engine, encoder: Encoder, level: ReuseLevel
) -> None:
    """It is the edit that asks for that ring and that interval."""
    options: dict[str, Any] = {"num_inference_steps": 12, "cache": "require", "mask_ring": 1}
    one = small(job(encoder, 6, "primes", **options))
    assert edit(engine, one).meta["mask_ring"] == 1
    judge_by(engine, DueTimes(engine.config, lambda: Pricing(0.0, 1.0, 1.0, 0.0)))
    final = edit(engine, elastic(one, level.psnr, due_ms=1))
    assert final.meta["reuse"]["level"] == level.name
    ring = 1 if level.ring is None else level.ring
    options |= {"mask_ring": ring, "step_interval": level.step_interval}
    reference = edit(engine, small(job(encoder, 6, "asks", **options)))
    assert np.array_equal(final.latents, reference.latents)
    for name in (
        "mask_ring",
        "active_tokens",
        "computed_tokens",
        "cache_bytes",
        "steps_skipped",
        "steps",
    ):
        assert final.meta[name] == reference.meta[name]
    assert final.meta["mask_ring"] == ring


def test_the_scheduler_counts_a_late_edit_at_its_level(
    engine: Engine, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ticket has the tokens and the steps of the row that it gets."""
    options: dict[str, Any] = {"num_inference_steps": 12, "cache": "require", "mask_ring": 1}
    one = small(job(encoder, 6, "primes", **options))
    edit(engine, one)
    judge_by(engine, DueTimes(engine.config, lambda: Pricing(0.0, 1.0, 1.0, 0.0)))
    scheduler, tickets = engine.manager.scheduler, list[Ticket]()
    reprice = scheduler.reprice

    def recorded(ticket: Ticket, fewer: int = 0) -> None:
        reprice(ticket, fewer)
        tickets.extend(scheduler.running)

    monkeypatch.setattr(scheduler, "reprice", recorded)
    level = LEVELS[FILL, "cached"][0]
    meta = edit(engine, elastic(one, level.psnr, due_ms=1)).meta
    [ticket] = tickets
    assert (ticket.active_tokens, ticket.steps) == (meta["active_tokens"], meta["steps"])
    assert meta["mask_ring"] == level.ring


@pytest.fixture
def anchoring(tiny_fill: Path, encoder: Encoder) -> Any:
    """An engine whose edits without a template have refresh steps."""
    engine = make_engine(tiny_fill, encoder, own_anchors=0.35)
    yield engine
    engine.close(5.0)
    engine.cache.check_integrity()


@pytest.mark.parametrize("level", LEVELS[FILL, "own"], ids=lambda level: level.name)
def test_an_elastic_edit_with_refresh_steps_has_fewer(
    anchoring: Engine, encoder: Encoder, level: ReuseLevel
) -> None:
    judge_by(anchoring, DueTimes(anchoring.config, lambda: Pricing(0.0, 1.0, 1.0, 0.0)))
    edit_job = job(encoder, 8, "late", num_inference_steps=12, cache="own")
    meta = edit(anchoring, elastic(edit_job, level.psnr, due_ms=1)).meta
    assert meta["reuse"] == {"level": level.name, "steps_skipped": 0, "psnr": level.psnr}
    assert meta["dense_steps"] == level.refresh_steps == len(meta["anchors"])
    above = LEVELS[FILL, "own"][0].psnr + 1
    high_job = job(encoder, 8, "high", num_inference_steps=12, cache="own")
    assert edit(anchoring, elastic(high_job, above, due_ms=1)).meta["dense_steps"] == 3


def test_a_hit_that_steps_down_keeps_its_text_cached(anchoring: Engine, encoder: Encoder) -> None:
    """As the edit that asks for its interval."""
    options: dict[str, Any] = {"num_inference_steps": 12, "cache": "require"}
    assert edit(anchoring, job(encoder, 9, "plain", **options)).meta["text_steps"] == 3
    judge_by(anchoring, DueTimes(anchoring.config, lambda: Pricing(0.0, 1.0, 1.0, 0.0)))
    [level] = [entry for entry in LEVELS[FILL, "cached"] if entry.name.endswith("ring1-interval4")]
    final = edit(anchoring, elastic(job(encoder, 9, "late", **options), level.psnr, due_ms=1))
    assert final.meta["reuse"]["level"] == level.name
    options["step_interval"] = level.step_interval
    reference = edit(anchoring, job(encoder, 9, "asks", **options))
    assert np.array_equal(final.latents, reference.latents)
    assert final.meta["text_steps"] == reference.meta["text_steps"] < final.meta["steps"]


def test_a_hit_steps_down_to_nothing_that_is_more_work_than_it_is(
    anchoring: Engine, encoder: Encoder
) -> None:
    """Levels with another ring compute their text in every step."""
    options: dict[str, Any] = {"num_inference_steps": 12, "cache": "require", "mask_ring": 1}
    one = job(encoder, 9, "primes", **options)
    edit(anchoring, one)
    schedule = RefreshSchedules(anchoring.config, anchoring.adapter).beside_template(one, 0)[0]
    assert schedule is not None
    counted = [anchoring.adapter.totals(one, schedule, refresh=flag) for flag in (False, True)]
    plain = EditWork.of(one, anchoring.adapter)
    times = plain.cached_flops / plain.with_schedule(schedule, counted[0], counted[1]).cached_flops
    levels = LEVELS[FILL, "cached"]
    less = [level for level in levels if level.ring is None or times * level.work < 0.99]
    assert 0 < len(less) < len([level for level in levels if level.work < 0.99])
    judge_by(anchoring, DueTimes(anchoring.config, lambda: Pricing(0.0, 1000.0, 1000.0, 0.0)))
    meta = edit(anchoring, elastic(job(encoder, 9, "late", **options), 0.0, due_ms=11_900_000)).meta
    assert meta["reuse"]["level"] == less[0].name


def test_a_router_foretells_how_far_a_hit_steps_down_as_its_worker_does(
    anchoring: Engine, encoder: Encoder
) -> None:
    adapter, spec = anchoring.adapter, anchoring.adapter.spec
    edit_job = elastic(job(encoder, 9, "late", num_inference_steps=12, mask_ring=1), 30.0)
    state = RequestState.of(anchoring.prepared(edit_job), Sink(), adapter)
    schedule = RefreshSchedules(anchoring.config, adapter).beside_template(edit_job, 0)[0]
    state.set_plan(ExecutionPlan("cached", "hit", schedule_with_template=schedule), adapter)
    tokens = adapter.tokens(edit_job)
    levels = levels_of(edit_job.request.settings, spec.measured_levels, "cached", 12)
    router_edit = Edit(
        12, tokens.active, tokens.total, inner_tokens=tokens.inner, ring_tokens=tokens.ring,
        cached_levels=levels, dense_levels=LEVELS[FILL, "dense"],
    )  # fmt: skip
    pricing = priced_by_flops(anchoring, edit_job, 12)
    least = min(level.work for level in state.levels)
    assert WorkerView("w", pricing, 1, 1).least_share(router_edit) == pytest.approx(least, rel=0.02)
    assert least > 1.05 * levels[-1].work
    elsewhere = WorkerView("w", pricing, 1, 1, templates={})
    assert elsewhere.least_share(router_edit) == LEVELS[FILL, "dense"][-1].work


def test_an_edit_with_refresh_steps_does_not_wait_for_priming_that_is_later(
    anchoring: Engine, encoder: Encoder
) -> None:
    """Dense it would be late, and behind the priming in time; as it is it is in time now."""
    judge_by(anchoring, DueTimes(anchoring.config, lambda: Pricing(0.0, 1.0, 0.1, 0.0)))
    edit_job = due(job(encoder, 10, "first", num_inference_steps=20), due_ms=8000)
    assert edit(anchoring, edit_job).meta["cache"] == "own"


def test_an_elastic_edit_is_refused_by_what_its_lowest_level_takes(
    engine: Engine, encoder: Encoder
) -> None:
    judge_by(engine, DueTimes(engine.config, lambda: Pricing(0.0, 1.0, 1.0, 0.0)))
    edit_job = job(encoder, 7, "tight", num_inference_steps=16, cache="off")
    for name, floor, refused in (("low", 0.0, False), ("high", 60.0, True)):
        sink = Sink()
        job_with_deadline = dropped(
            replace(edit_job, request=replace(edit_job.request, request_id=name)), 9000
        )
        engine.submit(elastic(job_with_deadline, floor, due_ms=9000), sink)
        assert isinstance(sink.wait(), Failed) == refused


def test_nothing_is_refused_by_an_estimate_or_where_it_is_switched_off(
    engine: Engine, encoder: Encoder
) -> None:
    prices = Pricing(1.0, 1.0, 1.0, 0.0)
    off = structs.replace(engine.config, slo=SloConfig(refuse_above=0.0))
    for due_times in (DueTimes(engine.config, lambda: None), DueTimes(off, lambda: prices)):
        judge_by(engine, due_times)
        assert edit(engine, dropped(job(encoder, 5, "taken", num_inference_steps=1), 3000)).meta
