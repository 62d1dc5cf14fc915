"""Counted FLOPs of steps, to which the cost model is fitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from maskserve_benchmarks.published_models import FLUX_DEV
from maskserve_engine.cache.loader import HostMover
from maskserve_engine.families.flux.spec import flux_work
from maskserve_engine.families.registry import load_encoder
from maskserve_engine.planning.flops import BatchFlops
from tests.fakes.jobs import config_of
from tests.support.engines import edit, job, make_engine


def test_a_batch_is_counted_once_for_as_long_as_it_goes_on_in_the_same_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = flux_work(FLUX_DEV, 128, 128)
    rows = [work.totals([work.row_at(m, 512)]) for m in (0.1, 0.2, 0.3)]
    kv, project = (("kv",) * len(work.blocks), ("project",) * len(work.blocks))
    ways: list[tuple[Any, Any, Any]] = [
        (rows, [True, True, False], kv),
        (rows, [True, False, False], kv),
        (rows, [True, False, False], project),
        (rows[:2], [False, False], ()),
        ([rows[0], work.totals([work.row_at(0.2, 512)])], [False, False], ()),
    ]
    calls: list[Any] = []

    class Watched:
        def batch_flops(self, *args: Any) -> float:
            calls.append(args)
            return work.batch_flops(*args)

    watched: Any = Watched()
    counted, counts = BatchFlops(), []
    for number, way in enumerate(ways, 1):
        ofs = {counted.of(watched, *way) for _ in range(3)}
        assert len(ofs) == 1
        assert len(calls) == number
        counts += ofs
    assert counts[0] < counts[1] < counts[2]
    expected = [work.batch_flops(None, (), ofs) for ofs in rows]
    assert counts[3] == counts[4] == pytest.approx(expected[0] + expected[1])


class LostMover(HostMover):
    """Brings nothing."""

    def move(self, parts: Any, ids: Any) -> Any:
        raise OSError("lost")


def test_a_row_whose_entry_was_lost_counts_as_the_dense_row_that_it_is(
    tiny_fill: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = load_encoder(config_of(tiny_fill))
    engine = make_engine(tiny_fill, encoder)
    try:
        edit(engine, job(encoder, 0, "primes", cache="require"))
        steps: list[float] = []
        monkeypatch.setattr(
            engine.runner.planner.costs, "step", lambda flops, *_: steps.append(flops)
        )
        edit(engine, job(encoder, 0, "dense", cache="off"))
        [dense] = set(steps)
        monkeypatch.setattr(engine.cache.store.loader, "mover", LostMover())
        steps.clear()
        hurt = edit(engine, job(encoder, 0, "hurt", cache="require"))
        assert hurt.meta["kinds"].keys() == {"dense"}
        assert set(steps) == {dense}
    finally:
        engine.close(5.0)
