"""Rows with anchors of their own run without an engine, for the adapter of any family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.own_anchors import OwnPlan, OwnReader
from maskserve_engine.families.adapter import Adapter
from maskserve_harness.benchmarks.replay import plan_of_kinds


def plan(*dense: int, text: bool = True, format: str = "model") -> OwnPlan:
    return OwnPlan(frozenset(dense), format, text)


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
        reads: Any = [None if own is None or row.step in own.anchors else reader.turn_to(row.step)
                      for row, own, reader in live]  # fmt: skip
        adapter.step([row for row, _, _ in live], kinds if any(reads) else None, reads)


def result(adapter: Adapter, job: EditJob, own: OwnPlan | None) -> Any:
    """[C, h, w] latents of a row run alone."""
    row = row_of(adapter, job, own)
    run(adapter, [row], [own])
    return row.result().array()
