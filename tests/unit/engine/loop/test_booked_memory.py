"""The device's memory is held by whoever computes, and by nobody who waits or has failed."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from maskserve_engine.cache.loader import EntryLost
from maskserve_engine.families.registry import Encoder, load_encoder
from maskserve_engine.loop.engine import Engine
from tests.fakes.jobs import config_of
from tests.support.engines import accept, edit, job, make_engine
from tests.support.sink import Sink


@pytest.fixture(scope="module")
def encoder(tiny_fill: Path) -> Encoder:
    return load_encoder(config_of(tiny_fill))


@pytest.fixture
def engine(tiny_fill: Path, encoder: Encoder) -> Iterator[Engine]:
    engine = make_engine(tiny_fill, encoder)
    yield engine
    engine.close(5.0)
    engine.cache.store.check_integrity()


def test_edits_that_wait_for_a_row_hold_no_entry(engine: Engine, encoder: Encoder) -> None:
    """Entries are resolved when an edit is admitted: what is evicted before that is gone."""
    edit(engine, job(encoder, 1, "first", cache="require"))
    store, rows = engine.cache.store, engine.config.engine.max_rows
    jobs = [replace_id(job(encoder, 1, "first"), f"w{n}") for n in range(3 * rows)]
    sinks = [Sink() for _ in jobs]

    def accept_and_evict() -> tuple[list[str], int]:  # in one turn: no step comes between
        for edit_job, sink in zip(jobs, sinks, strict=True):
            accept(engine, edit_job, sink)
        hows = [engine.manager.edits[edit_job.request.request_id].plan.mode for edit_job in jobs]
        engine.cache.evict(jobs[0].request.template_id)
        return hows, store.memory.nbytes

    hows, nbytes = engine.ask(accept_and_evict).result(30)
    assert set(hows) == {"cached"}
    assert nbytes == 0
    for sink in sinks:
        assert sink.final().meta["kinds"].keys() == {"dense"}


def test_what_rows_hold_of_an_evicted_template_is_booked(engine: Engine, encoder: Encoder) -> None:
    edit(engine, job(encoder, 2, "first", cache="require"))
    memory, sink = engine.cache.store.memory, Sink()
    nbytes = memory.nbytes / sum(len(template.anchors) for template in memory.entries().values())

    def run_and_evict() -> tuple[int, int]:
        accept(engine, replace_id(job(encoder, 2, "first"), "runs"), sink)
        engine.run_once()
        engine.cache.evict(job(encoder, 2, "first").request.template_id)
        return memory.booked, len(set(engine.manager.edits["runs"].plan.anchors))

    booked, anchors = engine.ask(run_and_evict).result(30)
    assert booked >= anchors * nbytes > 0
    assert sink.final().meta["cache"] == "hit"
    assert engine.ask(lambda: memory.booked).result(30) == 0


@pytest.mark.parametrize("error", [RuntimeError, EntryLost])
def test_what_a_failed_step_held_is_let_go_before_it_is_tried_again(
    engine: Engine, encoder: Encoder, caplog: pytest.LogCaptureFixture, error: type[Exception]
) -> None:
    # pytest keeps what it is told.
    caplog.set_level(logging.CRITICAL + 1, "maskserve_engine.loop.local_executor")
    step, tries, alive = engine.adapter.step, list[weakref.ref[torch.Tensor]](), list[bool]()

    def fails_once(*args: Any) -> None:
        if not tries:
            activations = torch.zeros(4)
            tries.append(weakref.ref(activations))
            raise error("out of memory")
        alive.append(tries[0]() is not None)
        step(*args)

    engine.adapter.step = fails_once  # type: ignore[method-assign]
    assert edit(engine, job(encoder, 3, "it", cache="off")).meta["steps"] == len(alive)
    assert not any(alive)


def replace_id(edit_job: Any, request_id: str) -> Any:
    return replace(edit_job, request=replace(edit_job.request, request_id=request_id))
