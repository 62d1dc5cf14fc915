"""The engine thread with a tiny model: answers, mixes, cancels, deadlines, drain, failures."""

from __future__ import annotations

import queue
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from maskserve_common.config import Config
from maskserve_common.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    Overloaded,
)
from maskserve_common.imaging.masks import active_tokens
from maskserve_common.status import StatusReader
from maskserve_engine.base.job import EditJob, Failed, FinalEvent, PreviewEvent, ProgressEvent
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.mmdit.rows import FlowRow
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.loop.engine import Engine
from maskserve_engine.start.assembly import load_engine
from maskserve_triton.health import Health
from tests.fakes.jobs import config_of, encode_case, random_case, tolerance
from tests.support.engines import accept
from tests.support.eventually import eventually
from tests.support.sink import Sink


@pytest.fixture(scope="module")
def encoder(tiny_fill: Path) -> Encoder:
    return load_encoder(config_of(tiny_fill))


@pytest.fixture
def config(tiny_fill: Path, tmp_path: Path) -> Config:
    return structs.replace(
        config_of(tiny_fill, cache={"entry_format": "model", "stride": 1}),
        runtime_dir=str(tmp_path),
    )


@pytest.fixture
def engine(config: Config, encoder: Encoder) -> Any:
    engine = load_engine(config)
    engine.cache.prompt = lambda: encoder.encode_prompt("")
    engine.start()
    yield engine
    engine.close(5.0)
    engine.cache.store.check_integrity()
    engine.manager.scheduler.check_integrity()
    assert len(engine.manager.scheduler) == 0


def job(encoder: Encoder, seed: int, name: str = "", **settings: Any) -> EditJob:
    case = random_case(np.random.default_rng(seed), **settings)
    return encode_case(encoder, case, name or f"edit-{seed}")


@pytest.fixture(scope="module")
def oracle(tiny_fill: Path) -> Adapter:
    """An adapter of its own: the engine's belongs to the engine's thread."""
    return load_adapter(config_of(tiny_fill))


def alone(oracle: Adapter, job: EditJob) -> np.ndarray:
    row = oracle.dense_row(job)
    while row.step < row.steps:
        oracle.step([row], None)
    return row.result().array()


def test_many_edits_at_once_each_get_their_own_result(
    engine: Engine, encoder: Encoder, oracle: Adapter
) -> None:
    jobs = [job(encoder, seed, cache="off") for seed in range(20)]
    sinks = [Sink() for _ in jobs]
    for edit_job, sink in zip(jobs, sinks, strict=True):
        engine.submit(edit_job, sink)
    for edit_job, sink in zip(jobs, sinks, strict=True):
        expected = alone(oracle, edit_job)
        assert np.abs(sink.final().latents - expected).max() <= tolerance(expected)
        assert sum(isinstance(e, FinalEvent | Failed) for e in sink.events) == 1


def test_meta_says_what_was_done(engine: Engine, encoder: Encoder) -> None:
    sink = Sink()
    edit_job = job(encoder, 1, num_inference_steps=4, strength=1.0, cache="off", mask_ring=1)
    engine.submit(edit_job, sink)
    meta = sink.final().meta
    assert meta["event"] == "final"
    assert (meta["step"], meta["steps"]) == (4, 4)
    assert meta["seed"] == edit_job.request.seed
    assert meta["cache"] == "off"
    assert meta["kinds"] == {"dense": 4 * engine.adapter.blocks}
    assert 0 < meta["mask_ratio"] <= 1
    assert meta["mask_ring"] == 1
    token = engine.adapter.spec.token_pixels
    assert meta["active_tokens"] == len(active_tokens(edit_job.edit_mask, token, ring=1))
    assert meta["active_tokens"] < meta["total_tokens"]
    # It ran dense: those of the mask are not all that were computed.
    assert meta["computed_tokens"] == 4 * meta["total_tokens"]
    assert meta["batch_mean"] == 1.0
    assert {"queue", "denoise", "load_stall"} <= set(meta["timings_ms"])


@pytest.mark.parametrize(
    ("part", "verb", "cache", "again"),
    [
        ("adapter", "prepare", "off", False),
        ("adapter", "totals", "off", False),
        ("cache", "look_up", "auto", False),
        ("cache", "look_up", "require", True),
        ("adapter", "dense_row", "off", False),
    ],
)
def test_a_bug_costs_its_edit_alone_before_the_first_step(
    engine: Engine,
    encoder: Encoder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    part: str,
    verb: str,
    cache: str,
    again: bool,
) -> None:
    """Wherever it shows, also when it is decided anew how an edit runs; the log has the trace."""
    sink, real = Sink(), getattr(getattr(engine, part), verb)

    def broken(job: EditJob, *args: Any, **named: Any) -> Any:
        if job.request.request_id == "bad" and named.get("again", False) == again:
            raise RuntimeError("a bug")
        return real(job, *args, **named)

    monkeypatch.setattr(getattr(engine, part), verb, broken)
    engine.submit(job(encoder, 7, "bad", cache=cache), sink)
    assert str(sink.error()) == "[ENGINE_FAILED] internal error (request bad)"
    records = [record for record in caplog.records if getattr(record, "request_id", "") == "bad"]
    assert ["a bug" in str(record.exc_info) for record in records] == [True]
    monkeypatch.undo()
    sink = Sink()
    engine.submit(job(encoder, 7, "good", cache=cache), sink)
    sink.final()


def test_progress_and_previews_come_in_order(engine: Engine, encoder: Encoder) -> None:
    sink = Sink()
    settings = {"num_inference_steps": 5, "strength": 1.0, "progress": True, "preview_every": 2}
    engine.submit(job(encoder, 2, **settings), sink)
    sink.final()
    kinds = [
        (type(e), e.step) for e in sink.events[:-1] if isinstance(e, ProgressEvent | PreviewEvent)
    ]
    assert kinds == [(ProgressEvent, 1), (PreviewEvent, 2), (ProgressEvent, 3), (PreviewEvent, 4)]


def test_cancel_frees_the_row_and_leaves_batch_mates_alone(
    engine: Engine, encoder: Encoder, oracle: Adapter
) -> None:
    long = {"num_inference_steps": 400, "strength": 1.0, "cache": "off"}
    mate = job(encoder, 3, "mate", num_inference_steps=30, cache="off")
    victim = job(encoder, 4, "victim", progress=True, **long)
    sinks = Sink(), Sink()
    engine.submit(victim, sinks[1])
    engine.submit(mate, sinks[0])
    while not sinks[1].events:
        time.sleep(0.005)
    engine.cancel("victim")
    assert isinstance(sinks[1].error(), Cancelled)
    expected = alone(oracle, mate)
    assert np.abs(sinks[0].final().latents - expected).max() <= tolerance(expected)


def test_a_deadline_that_passes_ends_the_edit(engine: Engine, encoder: Encoder) -> None:
    sink = Sink()
    engine.submit(job(encoder, 5, num_inference_steps=900, strength=1.0, deadline_ms=150), sink)
    assert isinstance(sink.error(), DeadlineExceeded)


def test_a_request_id_in_use_is_refused_and_the_first_goes_on(
    engine: Engine, encoder: Encoder
) -> None:
    first, second = Sink(), Sink()
    jobs = [job(encoder, seed, "same", num_inference_steps=60, cache="off") for seed in (6, 7)]
    for edit_job, sink in zip(jobs, (first, second), strict=True):
        engine.submit(edit_job, sink)
    assert isinstance(second.error(), InvalidRequest)
    first.final()


def test_a_full_queue_refuses_and_loses_nothing(config: Config, encoder: Encoder) -> None:
    small = structs.replace(
        config, engine=structs.replace(config.engine, max_rows=1, max_waiting=2)
    )
    engine = load_engine(small)
    engine.start()
    long = {"num_inference_steps": 60, "strength": 1.0, "cache": "off"}
    jobs, sinks = [job(encoder, number, **long) for number in range(8)], [Sink() for _ in range(8)]
    for edit_job, sink in zip(jobs, sinks, strict=True):
        engine.submit(edit_job, sink)
    answers = [sink.wait() for sink in sinks]
    refused = [a.error for a in answers if isinstance(a, Failed)]
    assert refused
    assert all(isinstance(error, Overloaded) for error in refused)
    assert len(answers) - len(refused) >= 2
    engine.close(5.0)


def test_drain_finishes_what_was_accepted_and_refuses_the_rest(
    engine: Engine, encoder: Encoder
) -> None:
    accepted, refused = Sink(), Sink()
    engine.submit(job(encoder, 8, num_inference_steps=40, cache="off"), accepted)
    engine.heartbeat().result(30)  # the edit is in
    engine.drain()
    engine.submit(job(encoder, 9), refused)
    assert isinstance(refused.error(), Overloaded)
    accepted.final()


def test_close_answers_whoever_is_left(config: Config, encoder: Encoder) -> None:
    engine = load_engine(config)
    engine.start()
    sink = Sink()
    engine.submit(job(encoder, 10, num_inference_steps=1000, strength=1.0, cache="off"), sink)
    engine.heartbeat().result(30)
    engine.close(0.2)
    assert isinstance(sink.error(), Overloaded)
    late = Sink()
    engine.submit(job(encoder, 11), late)
    assert isinstance(late.error(), EngineFailed)


def test_a_row_whose_step_fails_is_answered_and_its_mates_finish(
    engine: Engine, encoder: Encoder, oracle: Adapter
) -> None:
    bad = job(encoder, 12, "bad", num_inference_steps=10, cache="off")
    narrow = {**bad.conditioning, "pooled": bad.conditioning["pooled"][:-1]}
    bad = replace(bad, conditioning=narrow)  # the model call raises
    good = job(encoder, 13, "good", num_inference_steps=10, cache="off")
    sinks = Sink(), Sink()
    engine.submit(good, sinks[0])
    engine.submit(bad, sinks[1])
    assert isinstance(sinks[1].error(), EngineFailed)
    expected = alone(oracle, good)
    assert np.abs(sinks[0].final().latents - expected).max() <= tolerance(expected)


@pytest.mark.parametrize("part", ["load", "result"])
def test_a_row_that_fails_beside_its_step_is_answered_and_its_mates_finish(
    engine: Engine, encoder: Encoder, oracle: Adapter, part: str
) -> None:
    """Both allocate: loading the entries of a row and taking its result out."""
    out_of_memory = RuntimeError("out of memory")

    def broken(*_: Any) -> Any:
        raise out_of_memory

    make_row = engine.adapter.dense_row

    class NoEntries(FlowRow):
        """A row whose entries do not fit."""

        uses_entries, load = True, broken

    class NoResult(FlowRow):
        result = broken

    def dense_row(edit_job: EditJob) -> Any:
        row = make_row(edit_job)
        if row.request_id == "bad":
            row.__class__ = NoEntries if part == "load" else NoResult
        return row

    engine.adapter.dense_row = dense_row  # type: ignore[method-assign]
    good = job(encoder, 13, "good", num_inference_steps=10, cache="off")
    sinks = Sink(), Sink()
    engine.submit(good, sinks[0])
    engine.submit(job(encoder, 12, "bad", num_inference_steps=10, cache="off"), sinks[1])
    assert isinstance(sinks[1].error(), EngineFailed)
    expected = alone(oracle, good)
    assert np.abs(sinks[0].final().latents - expected).max() <= tolerance(expected)
    assert engine.state == "ready"


def test_an_engine_whose_every_step_fails_gives_up_and_says_so(
    config: Config, encoder: Encoder
) -> None:
    engine = load_engine(config)

    def broken(*_: Any) -> None:
        raise RuntimeError("the device is gone")

    engine.adapter.step = broken  # type: ignore[method-assign]
    engine.start()
    sinks = [Sink() for _ in range(4)]
    for number, sink in enumerate(sinks):
        engine.submit(job(encoder, number, cache="off"), sink)
        assert isinstance(sink.error(), EngineFailed)
    status = StatusReader(Path(config.runtime_dir) / "status").read()
    assert status is not None
    assert status.state == "failed"
    engine.close(1.0)


@pytest.mark.parametrize("after", [0, 3])
def test_an_engine_that_cannot_tell_its_status_has_failed_and_says_so(
    config: Config, encoder: Encoder, after: int
) -> None:
    """From the first record on, or from a later one, on an edit's way."""
    engine = load_engine(config)
    rows, calls = engine.manager.rows, []

    def broken() -> Any:
        calls.append(1)
        if len(calls) > after:
            raise RuntimeError("what rows hold cannot be told")
        return rows()

    engine.manager.rows = broken  # type: ignore[method-assign]
    engine.start()
    sink = Sink()
    engine.submit(job(encoder, 1, num_inference_steps=50, strength=1.0, cache="off"), sink)
    assert isinstance(sink.error(), EngineFailed)
    engine.close(1.0)
    health = Health(config)
    assert "engine has failed" in str(health.problem())
    health.close()


def test_an_edit_that_comes_in_as_the_engine_fails_is_told_so(
    config: Config, encoder: Encoder
) -> None:
    engine = load_engine(config)

    def broken() -> Any:
        raise RuntimeError("what rows hold cannot be told")

    engine.manager.rows = broken  # type: ignore[method-assign]
    sink = Sink()
    engine.submit(job(encoder, 1, cache="off"), sink)  # before the first turn, which fails
    engine.start()
    assert isinstance(sink.error(), EngineFailed)
    engine.close(1.0)


def test_an_engine_that_cannot_write_its_record_leaves_none_that_says_it_is_well(
    config: Config, encoder: Encoder, tmp_path: Path
) -> None:
    bad_config = structs.replace(config, runtime_dir=str(tmp_path / "gone"))
    engine = load_engine(bad_config)
    engine.start()
    sink = Sink()
    engine.submit(job(encoder, 1, cache="off"), sink)
    assert isinstance(sink.error(), EngineFailed)
    engine.close(1.0)
    assert engine.state == "failed"
    assert StatusReader(tmp_path / "gone" / "status").read() is None


def test_the_status_record_shows_rows_and_stays_fresh(
    engine: Engine, encoder: Encoder, config: Config
) -> None:
    reader = StatusReader(Path(config.runtime_dir) / "status")
    sink = Sink()
    engine.submit(
        job(encoder, 14, "seen", num_inference_steps=1000, strength=1.0, cache="off"), sink
    )

    def running() -> bool:
        status = reader.read()
        return status is not None and bool(status.running)

    eventually("the row is shown", running, 30.0)
    status = reader.read()
    assert status is not None
    assert [row.request_id for row in status.running] == ["seen"]
    assert status.running[0].steps_left <= 1000
    engine.cancel("seen")
    assert isinstance(sink.error(), Cancelled)

    def rewritten(since_ns: int) -> bool:
        record = reader.read()
        return record is not None and record.monotonic_ns > since_ns and not record.running

    # An engine that has nothing to do writes its record too; the machine may stall once.
    waits = []
    for _ in range(3):
        since_ns = time.monotonic_ns()
        text = "the record is rewritten, without the row"
        waits.append(eventually(text, lambda t=since_ns: rewritten(t)))
    assert min(waits) < 1.0


def test_an_edit_that_waits_is_not_shown_as_one_of_its_name_before_it(
    config: Config, encoder: Encoder
) -> None:
    engine = load_engine(structs.replace(config, engine=structs.replace(config.engine, max_rows=1)))
    engine.start()
    manager, settings = (
        engine.manager,
        {"num_inference_steps": 1000, "strength": 1.0, "cache": "off"},
    )
    engine.submit(job(encoder, 0, "running", **settings), Sink())
    eventually("it has a row", lambda: engine.ask(lambda: len(manager.rows()[0])).result(60) == 1)
    engine.submit(job(encoder, 1, "again", priority=1, **settings), Sink())

    def resubmit() -> list[int]:
        before = manager.rows()[1]
        manager.cancel("again")
        accept(engine, job(encoder, 1, "again", priority=2, **settings), Sink())
        return [row.priority for row in (*before, *manager.rows()[1])]

    assert engine.ask(resubmit).result(60) == [1, 2]
    engine.close(0.1)


def test_higher_priority_overtakes_the_queue(config: Config, encoder: Encoder) -> None:
    engine = load_engine(structs.replace(config, engine=structs.replace(config.engine, max_rows=1)))
    engine.start()
    order: queue.SimpleQueue[str] = queue.SimpleQueue()

    def sink(name: str) -> Any:
        return lambda event: order.put(name) if isinstance(event, FinalEvent) else None

    settings = {"num_inference_steps": 1000, "strength": 1.0, "cache": "off"}
    engine.submit(job(encoder, 0, "running", **settings), sink("running"))
    engine.heartbeat().result(30)
    settings["num_inference_steps"] = 5
    for name, priority in (("low", 0), ("high", 5)):
        engine.submit(job(encoder, 1, name, priority=priority, **settings), sink(name))
    engine.heartbeat().result(30)
    engine.cancel("running")  # only now may the others have the row
    assert [order.get(timeout=60) for _ in range(2)] == ["high", "low"]
    engine.close(5.0)
