"""Rows with anchors of their own run without an engine, for the adapter of any family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.own_anchors import OwnPlan, OwnReader
from maskserve_engine.families.adapter import Adapter
from maskserve_harness.benchmarks.replay import plan_of_kinds
from tests.fakes.jobs import tolerance


def plan(
    *anchors: int,
    text: bool = True,
    ring: bool = False,
    format: str = "model",
    foresees: bool = False,
    bends: bool = False,
) -> OwnPlan:
    return OwnPlan(frozenset(anchors), format, text, ring, bends=bends, foresees=foresees)


def row_of(adapter: Adapter, job: EditJob, own: OwnPlan | None) -> Any:
    return adapter.dense_row(job) if own is None else adapter.anchored_row(job, own)


def run(adapter: Adapter, rows: Sequence[Any], plans: Sequence[OwnPlan | None]) -> None:
    """All steps of rows, together; those without a plan are dense."""
    readers = [own and OwnReader(row, adapter.entry_blocks)
               for row, own in zip(rows, plans, strict=True)]  # fmt: skip
    kinds = plan_of_kinds(("kv",) * adapter.blocks)
    while any(row.step < row.steps for row in rows):
        live = [(row, own, reader) for row, own, reader in zip(rows, plans, readers, strict=True)
                if row.step < row.steps]  # fmt: skip
        reads: Any = [None if own is None or row.step in own.dense else reader.turn_to(row.step)
                      for row, own, reader in live]  # fmt: skip
        adapter.step([row for row, _, _ in live], kinds if any(reads) else None, reads)


def assert_as_alone(
    rows: Sequence[Any], plans: Sequence[OwnPlan | None], alone: Callable[[int, Any], Any]
) -> None:
    """Rows that have run together are what each is alone.

    Of a format that rounds, a value that lies on an edge goes to either side for a difference in
    its last digit. Few values do, so such a row differs by less than the format makes of it; one
    that reads what is not its own differs by eight times that and more.

    Args:
        rows: at their ends.
        plans: theirs.
        alone: [C, h, w] latents of the row of a number, run alone with a plan.
    """
    for number, (row, own) in enumerate(zip(rows, plans, strict=True)):
        expected = alone(number, own)
        room = tolerance(expected)
        if own is not None and own.format != "model":
            exact = alone(number, replace(own, format="model"))
            room += float(np.abs(expected - exact).max())
        assert np.abs(row.result().array() - expected).max() <= room, own


def check_dense_anchors(adapter: Any, job: EditJob, *, text: bool = True) -> None:
    """A row whose every step is an anchor is a dense one; of one with fewer the rest is near.

    Args:
        adapter: of a family whose tokens are 2x2 latents.
        job: of six steps.
        text: whether the steps between leave the text out.
    """
    dense = result(adapter, job, None)
    every = plan(*range(6), text=text)
    row = row_of(adapter, job, every)
    run(adapter, [row], [every])
    at = np.zeros(row.grid[0] * row.grid[1], bool)
    at[row.inactive.active] = True
    shown = at.reshape(row.grid).repeat(2, 0).repeat(2, 1)
    assert np.abs(row.result().array() - dense)[:, shown].max() <= tolerance(dense)
    for few in (plan(0, 1, 3, text=text), plan(0, 3, 5, text=text, foresees=True)):
        apart = np.abs(result(adapter, job, few) - dense)[:, shown].max()
        assert 0 < apart < np.abs(dense).max()


def result(adapter: Adapter, job: EditJob, own: OwnPlan | None) -> Any:
    """[C, h, w] latents of a row run alone."""
    row = row_of(adapter, job, own)
    run(adapter, [row], [own])
    return row.result().array()
