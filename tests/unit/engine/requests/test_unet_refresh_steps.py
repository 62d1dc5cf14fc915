"""Edits of inpainting UNets without a template, run by an engine with refresh steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskserve_common.contracts.request import Lora
from maskserve_engine.base.job import EditJob
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.loop.engine import Engine
from maskserve_engine.requests.refresh_schedules import RefreshSchedules
from maskserve_engine.requests.state import RequestState
from tests.fakes.jobs import config_of
from tests.support.engines import edit, job, make_engine
from tests.support.eventually import eventually
from tests.support.sink import Sink


@pytest.fixture(scope="module")
def folder(tiny_unets: dict[str, Path]) -> Path:
    return tiny_unets["sd-fill"]


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    return load_encoder(config_of(folder))


@pytest.fixture
def engine(folder: Path, encoder: Encoder) -> Iterator[Engine]:
    engine = make_engine(folder, encoder, own_anchors=-1.0)
    yield engine
    engine.close(5.0)


def idle(engine: Engine) -> None:
    """Nothing is held for anybody."""
    eventually("the edit has left", lambda: not engine.manager.edits)
    engine.cache.check_integrity()


def strip(edit_job: EditJob) -> EditJob:
    """The same of a mask along a whole side."""
    mask = np.zeros_like(edit_job.edit_mask)
    mask[:8] = 255
    return replace(edit_job, edit_mask=mask)


def test_first_edits_and_strips_have_refresh_steps(engine: Engine, encoder: Encoder) -> None:
    box = job(encoder, 1, "box", num_inference_steps=20)
    for number, edit_job in enumerate(
        (box, strip(job(encoder, 1, "strip", num_inference_steps=20)))
    ):
        meta = edit(engine, edit_job).meta
        assert (meta["cache"], meta.get("dense_for")) == ("own", None), number
        steps, anchors = meta["steps"], meta["anchors"]
        assert (steps, anchors) == (21, [0, 1, 10])  # of {0, 10, 18}: lookahead computes the others
        assert meta["text_steps"] == steps  # it is in attention of its own
        active, total = meta["active_tokens"], meta["total_tokens"]
        assert meta["computed_tokens"] == len(anchors) * total + (steps - 1) * active
        assert meta["own_bytes"] > 0
        assert list(meta["refresh_errors"]) == ["10", "18"]
        assert 0 < meta["refresh_error"] < 1
    idle(engine)


def test_edits_read_no_template_that_do_not_insist(engine: Engine, encoder: Encoder) -> None:
    """Some edits have 28 dB with entries, and 41 dB with refresh steps."""
    edit(engine, job(encoder, 3, "first", num_inference_steps=12, cache="require"))

    def way(cache: str, *loras: Lora) -> str:
        edit_job = job(encoder, 3, "next", num_inference_steps=12, cache=cache)
        edit_job = replace(edit_job, request=replace(edit_job.request, loras=loras))
        state = RequestState.of(edit_job, Sink(), engine.adapter)
        assert engine.manager.policy is not None
        return engine.manager.policy.choose(state).outcome

    lora = Lora(name="a", version="1")
    assert [way("auto"), way("auto", lora)] == ["own", "own"]
    assert [way("require"), way("require", lora)] == ["hit", "hit"]
    idle(engine)


def test_without_anchors_a_strip_is_dense(folder: Path, encoder: Encoder) -> None:
    engine = make_engine(folder, encoder, own_anchors=0.0)
    try:
        meta = edit(engine, strip(job(encoder, 1, "strip", num_inference_steps=8))).meta
        assert (meta["cache"], meta["dense_for"]) == ("off", "mask_side")
    finally:
        engine.close(5.0)


def test_what_is_booked_is_enough_and_without_room_it_is_dense(
    engine: Engine, encoder: Encoder
) -> None:
    counts: list[int] = []
    executor: Any = engine.executor
    release = executor.release

    def watched(row: str) -> Any:
        record = executor.rows.get(row)
        if record is not None:
            counts.append(sum(anchor.nbytes for anchor in record.row.step_caches))
        return release(row)

    executor.release = watched
    for seed in range(3):
        meta = edit(engine, job(encoder, seed, f"row-{seed}", num_inference_steps=10)).meta
        assert 0 < counts[-1] <= meta["own_bytes"]
    engine.cache.store.memory.budget_bytes = 1
    meta = edit(engine, job(encoder, 9, "dense", num_inference_steps=10)).meta
    assert (meta["cache"], meta["dense_for"]) == ("miss", "memory")
    idle(engine)


def test_a_cancelled_one_leaves_nothing(engine: Engine, encoder: Encoder) -> None:
    sink = Sink()
    engine.submit(job(encoder, 6, "gone", num_inference_steps=900, progress=True), sink)
    eventually("it runs", lambda: len(sink.events) > 2)
    engine.cancel("gone")
    assert "cancelled" in str(sink.error())
    idle(engine)


def test_beside_edits_that_hit_and_dense_ones_each_is_as_alone(
    engine: Engine, encoder: Encoder
) -> None:
    first = job(encoder, 7, "own", num_inference_steps=12, cache="own")

    def named_job(name: str, steps: int, cache: str) -> EditJob:
        settings = job(encoder, 7, name, num_inference_steps=steps, cache=cache).request
        return replace(first, request=replace(settings, request_id=name))

    jobs = [
        named_job("own-a", 12, "own"), named_job("hit", 11, "require"),
        named_job("dense", 13, "off"), named_job("own-b", 8, "own"),
    ]  # fmt: skip
    latents = [
        edit(
            engine, replace(edit_job, request=replace(edit_job.request, request_id=f"{number}"))
        ).latents
        for number, edit_job in enumerate(jobs)
    ]
    sinks = [Sink() for _ in jobs]
    for edit_job, sink in zip(jobs, sinks, strict=True):
        engine.submit(edit_job, sink)
    for expected, sink in zip(latents, sinks, strict=True):
        result = sink.final().latents
        assert np.abs(result - expected).max() <= 1e-4 * max(1.0, np.abs(expected).max())
    idle(engine)


def test_anchors_of_a_base_model_are_nearest_where_there_is_most_noise(
    tiny_unets: dict[str, Path],
) -> None:
    """Evenly far apart those of trained ones kept 37 dB, and so 44."""
    config = config_of(tiny_unets["sd-base"])
    adapter, base_encoder = load_adapter(config), load_encoder(config)
    base_job = job(base_encoder, 1, "base", num_inference_steps=20)
    plan = RefreshSchedules(config, adapter).of(base_job)
    assert plan is not None
    assert plan.second_order
    gaps = [later - sooner for sooner, later in pairwise(sorted(plan.refresh_steps))]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 2 * gaps[0]
