"""The loop with no cache: no store, no templates, and every edit computes all tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from maskserve_common.errors import Cancelled
from maskserve_common.status import StatusReader
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.registry import load_encoder
from maskserve_engine.loop.engine import Engine
from maskserve_engine.start.assembly import load_engine
from tests.fakes.jobs import config_of
from tests.support.draws import fresh_seed
from tests.support.engines import edit, job, make_engine
from tests.support.sink import Sink


@pytest.fixture(scope="module", params=["fill", "sd-base"])
def folder(request: pytest.FixtureRequest, tiny_fill: Path, tiny_unets: dict[str, Path]) -> Path:
    return tiny_fill if request.param == "fill" else tiny_unets[request.param]


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    return load_encoder(config_of(folder))


@pytest.fixture
def engine(folder: Path, tmp_path: Path) -> Any:
    config = config_of(folder, cache={"enabled": False})
    engine = load_engine(structs.replace(config, runtime_dir=str(tmp_path)))
    engine.start()
    yield engine
    engine.close(5.0)
    engine.manager.scheduler.check_integrity()
    engine.manager.resource_states.check_integrity()


def seed() -> int:
    return fresh_seed()


def test_edits_are_those_of_a_cached_worker_that_run_dense(
    engine: Engine, folder: Path, encoder: Encoder
) -> None:
    first = seed()
    jobs = [job(encoder, first + n, f"edit-{n}") for n in range(3)]
    cached_engine = make_engine(folder, encoder)
    try:
        for edit_job in jobs:
            off = structs.replace(edit_job.request.settings, cache="off")
            dense = replace(edit_job, request=replace(edit_job.request, settings=off))
            expected, got = edit(cached_engine, dense), edit(engine, edit_job)
            assert np.array_equal(got.latents, expected.latents), first
            assert (got.meta["cache"], got.meta["cache_tier"]) == ("off", "")
            assert got.meta["kinds"] == expected.meta["kinds"]
    finally:
        cached_engine.close(5.0)


def test_a_template_seen_again_is_not_primed(engine: Engine, encoder: Encoder) -> None:
    edit_job = job(encoder, seed(), "first")
    for name in ("first", "second", "third"):
        again = replace(edit_job, request=replace(edit_job.request, request_id=name))
        assert edit(engine, again).meta["cache"] == "off"
    assert engine.counters["priming_rows_total"] == 0
    assert engine.prime(edit_job).result(30) == "absent"


def test_what_is_asked_of_a_cache_is_answered(engine: Engine, encoder: Encoder) -> None:
    name = job(encoder, 1, "one").request.template_id
    assert engine.templates().result(30) == []
    assert engine.pin(name).result(30) is False
    assert engine.unpin(name).result(30) is False
    assert engine.evict(name).result(30) == 0
    with pytest.raises(AssertionError, match="enabled"):
        engine.cache  # noqa: B018


def test_the_record_names_no_tiers(engine: Engine, encoder: Encoder, tmp_path: Path) -> None:
    edit(engine, job(encoder, seed(), "one"))
    engine.heartbeat().result(30)
    status = StatusReader(tmp_path / "status").read()
    assert status is not None
    assert (dict(status.templates), dict(status.tier_bytes)) == ({}, {})
    assert status.served is not None
    assert not status.served.cache
    assert not [name for name in status.counters if name.startswith(("cache_hits", "primings"))]


def test_edits_end_early(engine: Engine, encoder: Encoder) -> None:
    sink = Sink()
    edit_job = job(encoder, seed(), "gone", num_inference_steps=50)
    engine.submit(edit_job, sink)
    engine.cancel("gone")
    assert isinstance(sink.error(), Cancelled)
    assert edit(engine, job(encoder, seed(), "next")).meta["event"] == "final"
