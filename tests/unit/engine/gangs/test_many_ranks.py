"""Workers of four and eight devices, a process for each, over gloo: at whatever degree edits step,
they equal those of one device (design section 8).
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from maskserve_common.config import Config
from maskserve_engine.base.job import EditJob, FinalEvent
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.registry import load_encoder
from maskserve_engine.gangs.executor import GangExecutor
from maskserve_engine.loop.engine import Engine
from maskserve_engine.start.assembly import load_engine
from tests.fakes.jobs import config_of, tolerance
from tests.fakes.tiny_model import with_heads
from tests.support.any_degree import AnyDegreeScheduler, gangs_of
from tests.support.engines import job
from tests.support.eventually import eventually
from tests.support.sink import Sink

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
HEADS = 10
"""Heads of the model: two ranks have 5 each, four 3 or 2, eight 2 or 1."""


@pytest.fixture(scope="module")
def model(tiny_fill: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_heads(tiny_fill, tmp_path_factory.mktemp("heads") / "ten", HEADS)


@pytest.fixture(scope="module")
def encoder(model: Path) -> Encoder:
    return load_encoder(config_of(model))


def config_for(model: Path, devices: int) -> Config:
    return config_of(
        model,
        model={"torch_threads": 1},
        engine={"devices": devices, "warm_up": False, "policy": "deadline"},
        cache={
            "entry_format": "model",
            "stride": 2,
            "dense_above_ratio": 1.0,
            "plan": "fixed",
            "own_text": "computed",  # as where devices share steps
        },
    )


def started(config: Config, encoder: Encoder, *, draws: bool = False) -> Engine:
    devices = config.engine.devices
    drawn = (
        (lambda rows, waiting, share: AnyDegreeScheduler(devices, rows, waiting)) if draws else None
    )
    engine = load_engine(config, policy=drawn)
    engine.cache.prompt = lambda: encoder.encode_prompt("")
    engine.start()
    return engine


@pytest.fixture(scope="module")
def one(model: Path, encoder: Encoder) -> Iterator[Engine]:
    config = config_for(model, 1)
    spread = structs.replace(config, engine=structs.replace(config.engine, policy="spread"))
    engine = started(spread, encoder)
    yield engine
    engine.close(5.0)


@pytest.fixture(scope="module", params=[4, 8])
def many(request: pytest.FixtureRequest, model: Path, encoder: Encoder) -> Iterator[Engine]:
    engine = started(config_for(model, request.param), encoder, draws=True)
    yield engine
    engine.close(5.0)
    engine.manager.scheduler.check_integrity()
    assert len(engine.manager.scheduler) == 0


def edits(encoder: Encoder, count: int, name: str, steps: int = 6) -> list[EditJob]:
    """Edits of two templates, dense and cached in turn."""
    return [
        job(
            encoder,
            number // 2 % 2,
            f"{name}-{number}",
            num_inference_steps=steps,
            cache=("off", "require")[number % 2],
        )
        for number in range(count)
    ]


def run(engine: Engine, jobs: list[EditJob]) -> list[FinalEvent]:
    sinks = [Sink() for _ in jobs]
    for edit_job, sink in zip(jobs, sinks, strict=True):
        engine.submit(edit_job, sink)
    return [sink.final() for sink in sinks]


def assert_same(finals: list[FinalEvent], expected: list[FinalEvent]) -> None:
    for final, reference in zip(finals, expected, strict=True):
        assert final.meta["cache"] == reference.meta["cache"]
        maximum = np.abs(final.latents - reference.latents).max()
        assert maximum <= tolerance(reference.latents)


def draws_of(engine: Engine) -> AnyDegreeScheduler:
    policy = engine.manager.scheduler
    assert isinstance(policy, AnyDegreeScheduler)
    return policy


def executor_of(engine: Engine) -> GangExecutor:
    assert isinstance(engine.executor, GangExecutor)
    return engine.executor


def test_every_degree_equals_one_device(one: Engine, many: Engine, encoder: Encoder) -> None:
    """A cached edit reports the bytes that one rank has loaded, of those with most heads: those of
    its heads.
    """
    run(many, edits(encoder, 4, "primes"))
    jobs, devices = edits(encoder, 4, "whole"), many.config.engine.devices
    run(one, jobs)
    expected = run(one, jobs)
    for degree in (degree for degree in (1, 2, 4, 8) if degree <= devices):
        draws_of(many).draws.always = tuple(range(devices - degree, devices))
        result = run(many, edits(encoder, 4, f"by-{degree}"))
        assert_same(result, expected)
        for final, reference in zip(result[1::2], expected[1::2], strict=True):
            loaded, whole = (
                sum(answer.meta["cache_bytes"].values()) for answer in (final, reference)
            )
            assert loaded * HEADS == whole * math.ceil(HEADS / degree) > 0
    draws_of(many).draws.always = ()


def test_a_degree_drawn_at_each_step_equals_one_device(
    one: Engine, many: Engine, encoder: Encoder
) -> None:
    jobs = edits(encoder, 12, "drawn", steps=20)
    draws_of(many).draws.drawn.clear()
    assert_same(run(many, jobs), run(one, jobs))
    assert draws_of(many).draws.drawn == set(gangs_of(many.config.engine.devices))


def test_edits_go_on_where_one_of_many_ranks_is_lost(
    one: Engine, many: Engine, encoder: Encoder
) -> None:
    jobs = edits(encoder, 6, "lost", steps=80)
    expected = run(one, jobs)
    sinks = [Sink() for _ in jobs]
    for edit_job, sink in zip(jobs, sinks, strict=True):
        many.submit(edit_job, sink)
    executor = executor_of(many)
    process = executor.ranks.processes[2]
    eventually(
        "a row is there",
        lambda: any(process in row.steps_in_rank for row in list(executor.rows.values())),
        30.0,
    )
    os.kill(process.pid, signal.SIGKILL)
    eventually("it is noticed", lambda: 2 in executor.devices.lost, 2.0)
    assert_same([sink.final() for sink in sinks], expected)
    eventually("it is back", lambda: not executor.devices.lost, 120.0)
    draws_of(many).draws.drawn.clear()
    assert_same(
        run(many, edits(encoder, 12, "back", steps=20)),
        run(one, edits(encoder, 12, "back", steps=20)),
    )
    assert draws_of(many).draws.drawn == set(gangs_of(many.config.engine.devices))


def test_due_times_choose_degrees_and_change_no_edit(
    one: Engine, model: Path, encoder: Encoder
) -> None:
    """As configured, with the policy for due times: some cannot be in time, some are due late."""
    engine = started(config_for(model, 4), encoder)
    try:
        jobs = edits(encoder, 8, "due", steps=20)
        for number, ms in ((0, 1), (1, 1), (2, 2000), (3, 2000), (4, 60_000)):
            jobs[number] = replace(jobs[number], request=replace(jobs[number].request, due_ms=ms))
        assert_same(run(engine, jobs), run(one, jobs))
        engine.manager.scheduler.check_integrity()
    finally:
        engine.close(5.0)
