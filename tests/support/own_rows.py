"""Rows with refresh steps, run without an engine, for the adapter of any family."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maskserve_benchmarks.steps.replay import plan_of_kinds
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.step_cache import RefreshSchedule, StepCache, StepCacheReader
from maskserve_engine.cache.entries import encode
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.layers.scatter_kv import KvSource
from tests.fakes.jobs import tolerance


def plan(
    *anchors: int,
    text: bool = True,
    ring: bool = False,
    format: str = "model",
    foresees: bool = False,
    bends: bool = False,
    power: float = 1.0,
) -> RefreshSchedule:
    return RefreshSchedule(
        frozenset(anchors), format, text, ring, power, second_order=bends, looks_ahead=foresees
    )


def row_of(adapter: Adapter, job: EditJob, own: RefreshSchedule | None) -> Any:
    return adapter.dense_row(job) if own is None else adapter.anchored_row(job, own)


def run(adapter: Adapter, rows: Sequence[Any], plans: Sequence[RefreshSchedule | None]) -> None:
    """Take all steps of the rows together. Rows without a schedule are dense."""
    readers = [own and StepCacheReader(row, adapter.entry_blocks)
               for row, own in zip(rows, plans, strict=True)]  # fmt: skip
    kinds = plan_of_kinds(("kv",) * adapter.blocks)
    while any(row.step < row.steps for row in rows):
        live = [(row, own, reader) for row, own, reader in zip(rows, plans, readers, strict=True)
                if row.step < row.steps]  # fmt: skip
        reads: Any = [None if own is None or row.step in own.dense else reader.turn_to(row.step)
                      for row, own, reader in live]  # fmt: skip
        adapter.step([row for row, _, _ in live], kinds if any(reads) else None, reads)


def assert_as_alone(
    rows: Sequence[Any], plans: Sequence[RefreshSchedule | None], alone: Callable[[int, Any], Any]
) -> None:
    """Check that rows that ran together equal rows that run alone.

    In a format that rounds, a difference in the last digit can move a value on an edge to either
    side. Few values do that, so such a row differs by less than the format's own error. A row that
    reads another row's values differs by at least eight times that.

    Args:
        rows: after their last step.
        plans: the refresh schedules of the rows.
        alone: [C, h, w] latents of the row of a number, run alone with a schedule.
    """
    for number, (row, own) in enumerate(zip(rows, plans, strict=True)):
        expected = alone(number, own)
        room = tolerance(expected)
        if own is not None and own.format != "model":
            exact = alone(number, replace(own, format="model"))
            room += float(np.abs(expected - exact).max())
        assert np.abs(row.result().array() - expected).max() <= room, own


class Straight(StepCache):
    """A step cache that keeps the exact values of every refresh step, and draws each line when it
    is read. The line goes through the refresh steps before and after the step, or through the last
    two.
    """

    def __init__(self, plan: RefreshSchedule) -> None:
        super().__init__(plan)
        self._shown: dict[int, dict[float, list[Tensor]]] = {}
        """By block, then by the refresh step's sigma: [tokens, width] of keys and of values."""

    def keys_values(self, block: int, keys: Tensor, values: Tensor) -> None:
        super().keys_values(block, keys, values)
        shown = self._shown.setdefault(block, {})
        shown[self._at] = [self._cached_of(block, x.flatten(1)).clone() for x in (keys, values)]

    def weight(self, sigma: float) -> float:
        last, before = self._ends(self._line.sigmas, sigma)
        return 0.0 if last == before else (last - self._along(sigma)) / (before - last)

    def source(self, block: int, sigma: float, part: str = "kv") -> KvSource:
        by_place = {self._along(at): found for at, found in self._shown[block].items()}
        last, before = self._ends(self._shown[block], sigma)
        share = 0.0 if last == before else (self._along(sigma) - last) / (before - last)
        ends = zip(by_place[last], by_place[before], strict=True)
        found = [torch.lerp(one, other, share) for one, other in ends]
        return KvSource(tuple([encode(each, "model") for each in found]), None, ())

    def _along(self, sigma: float) -> float:
        return float(sigma**self.plan.power)

    def _ends(self, anchors: Iterable[float], sigma: float) -> tuple[float, float]:
        """Places of the later refresh step and of the one before it."""
        places, now = sorted(map(self._along, anchors)), self._along(sigma)
        behind = [place for place in places if place > now]  # noise falls
        if len(places) > len(behind) > 0:
            return places[-len(behind) - 1], behind[0]
        return places[0], places[min(1, len(places) - 1)]


def check_dense_anchors(adapter: Any, job: EditJob, *, text: bool = True) -> None:
    """Check that a row whose every step is a refresh step equals the dense row. A row with fewer
    refresh steps must equal a row that draws its own lines, and be near the dense row.

    Args:
        adapter: of a family whose tokens are 2x2 latents.
        job: of six steps.
        text: whether steps between refresh steps leave the text out.
    """
    dense = result(adapter, job, None)
    every = plan(*range(6), text=text)
    row = row_of(adapter, job, every)
    run(adapter, [row], [every])
    at = np.zeros(row.grid[0] * row.grid[1], bool)
    at[row.inactive.active] = True
    shown = at.reshape(row.grid).repeat(2, 0).repeat(2, 1)
    assert np.abs(row.result().array() - dense)[:, shown].max() <= tolerance(dense)
    for few in (
        plan(0, 1, 3, text=text, power=1.5),
        plan(0, 3, 5, text=text, foresees=True, power=1.5),
    ):
        found = result(adapter, job, few)
        row = row_of(adapter, job, few)
        for prompt in row.passes:
            prompt.cache = Straight(few)
        run(adapter, [row], [few])
        expected = row.result().array()
        assert np.abs(found - expected)[:, shown].max() <= tolerance(expected)
        maximum = np.abs(found - dense)[:, shown].max()
        assert 0 < maximum < np.abs(dense).max()


def result(adapter: Adapter, job: EditJob, own: RefreshSchedule | None) -> Any:
    """[C, h, w] latents of a row that runs alone."""
    row = row_of(adapter, job, own)
    run(adapter, [row], [own])
    return row.result().array()
