"""Steps of a row whose entry is another at every step, and the ways to bring entries in."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from maskserve_core.contracts.entry_key import Anchor
from maskserve_core.planning.cost_model import CostModel
from maskserve_core.planning.flops import KINDS, RowTokens
from maskserve_core.planning.step_costs import StepCosts, step_costs
from maskserve_core.planning.two_stream import Plan, evaluate
from maskserve_engine.cache.entries import AnchorEntry
from maskserve_engine.cache.loader import Loader
from maskserve_engine.cache.memory_tier import MemoryTier
from maskserve_engine.cache.movers import Arrival, HostMover, Travelling
from maskserve_engine.cache.reader import EntryReader
from maskserve_engine.cache.store import Store
from maskserve_engine.cache.tier import Note
from maskserve_engine.families.flux.rows import FluxRow
from maskserve_engine.measured_costs import MeasuredCosts
from maskserve_engine.step_planner import Reading, StepPlanner, wants_of
from maskserve_harness.benchmarks.algorithm_1 import algorithm_1
from maskserve_harness.benchmarks.replay import plan_of_kinds
from maskserve_harness.benchmarks.step_rig import Bench

WAYS = ("naive", "strawman", "greedy", "ours", "ideal")
ENTRIES = 3
"""Anchors, read in turn: a step never finds the entry of the step before it."""


class Throttled(HostMover):
    """Copies the real bytes, then sleeps until a link of so many bytes per second would be done."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s

    def move(self, parts: Travelling, ids: NDArray[np.int64] | None) -> Arrival:
        begin = time.perf_counter()
        arrival = super().move(parts, ids)
        size = sum(coded.nbytes for coded in arrival.parts)
        left = size / self.bytes_per_s - (time.perf_counter() - begin)
        if left > 0:
            time.sleep(left)
        return arrival


class Pipeline:
    """One row of a mask ratio, stepped over and over, its entries over an emulated link.

    Args:
        bench: model and entries.
        mask_ratio: of the row.
        bytes_per_s: of the link; None: loads are free.
        costs: predictions are made with; its load line is the link's.
        emulated: blocks sleep for as long as `costs` says instead of computing, as a host does
            whose device computes; waits, loads and plans stay as they are.
    """

    def __init__(
        self,
        bench: Bench,
        mask_ratio: float,
        bytes_per_s: float | None,
        costs: CostModel,
        *,
        emulated: bool = False,
    ) -> None:
        self._emulated = emulated
        self.bench, self.row = bench, bench.row(mask_ratio, seed=7)
        assert self.row.selection is not None
        self.totals = bench.work.totals([tokens(self.row)])
        self.planner = StepPlanner(MeasuredCosts(costs))
        self._anchors = [Anchor(0.5, 500.0 + i) for i in range(ENTRIES)]
        mover = HostMover() if bytes_per_s is None else Throttled(bytes_per_s)
        self._store = Store(MemoryTier(2**40), [], None, Loader(mover))
        for anchor in self._anchors:
            note = Note("t", ENTRIES, 1.0)
            self._store.put("k", AnchorEntry(anchor, bench.entry.blocks), note)
        self._free = bench.row(mask_ratio, seed=7)
        self.predicted = 0.0

    def run(self, way: str, steps: int) -> list[float]:
        """Seconds of each of `steps` steps."""
        if way == "ideal":
            plan = plan_of_kinds(["kv"] * self.bench.blocks)
            return [self._timed(self._free, plan) for _ in range(steps)]
        assert self.row.selection is not None
        walk = [self._anchors[n % ENTRIES] for n in range(steps + 1)]
        reader = EntryReader(self._store, "k", walk, self.row.selection)
        step: Callable[[EntryReader, int], float] = getattr(self, f"_{way}")
        seconds = [step(reader, n) for n in range(steps)]
        reader.release()
        return seconds

    def plain(self, kind: str) -> float:
        """Seconds of one step whose entries are there, every block of `kind`."""
        return self._timed(self._free, plan_of_kinds([kind] * self.bench.blocks))

    @property
    def kv_bytes(self) -> float:
        """That a step reads if it takes every block's keys and values."""
        handle = self._free.entry
        assert handle is not None
        return float(handle.load.sizes[:, 1].sum())

    def close(self) -> None:
        self._store.check_integrity()
        self._store.close()

    def _naive(self, reader: EntryReader, n: int) -> float:
        """Everything is loaded, then the step runs."""
        plan = self._kinds(reader, n, ["kv"] * self.bench.blocks)
        begin = time.perf_counter()
        self._ask(reader, n, plan)
        for block in range(self.bench.blocks):
            assert reader.now is not None
            reader.now.wait(block, "kv")
        self._step(self.row, plan)
        return time.perf_counter() - begin

    def _strawman(self, reader: EntryReader, n: int) -> float:
        """Loads run beside the step, every block's; nothing is loaded before the step begins."""
        return self._within(reader, n, ["kv"] * self.bench.blocks)

    def _greedy(self, reader: EntryReader, n: int) -> float:
        """FlashPS Algorithm 1 chooses the blocks that are loaded."""
        costs = self._costs(reader, n)
        use, _ = algorithm_1(
            costs.compute[:, KINDS.index("kv")].tolist(),
            costs.compute[:, KINDS.index("dense")].tolist(),
            costs.loads[:, 1].tolist(),
        )
        return self._within(reader, n, _possible(use))

    def _ours(self, reader: EntryReader, n: int) -> float:
        """The engine's planner and what it brings in ahead, as `StepRunner` does."""
        begin = time.perf_counter()
        handle = reader.turn_to(n)
        assert handle is not None
        self.row.entry = handle
        planned = self.planner.plan(self.bench.work, [Reading(self.totals, handle.load, 1)], None)
        handle.want(wants_of(planned.plan), n)
        ahead = reader.look_ahead(n)
        if ahead is not None:
            ahead[0].want(wants_of(planned.ahead), ahead[1])
        self._step(self.row, planned.plan)
        self.predicted = planned.ahead.latency
        return time.perf_counter() - begin

    def _within(self, reader: EntryReader, n: int, kinds: Sequence[str]) -> float:
        plan = self._kinds(reader, n, kinds)
        begin = time.perf_counter()
        self._ask(reader, n, plan)
        self._step(self.row, plan)
        return time.perf_counter() - begin

    def _costs(self, reader: EntryReader, n: int) -> StepCosts:
        """Of a step with what has arrived."""
        handle = reader.turn_to(n)
        assert handle is not None
        self.row.entry = handle
        missing = {handle.load.tier: handle.load.missing[:, :2]}
        return step_costs(self.bench.work, self.totals, self.planner.costs.model, missing)

    def _kinds(self, reader: EntryReader, n: int, kinds: Sequence[str]) -> Plan:
        return evaluate(self._costs(reader, n), kinds, lead=0.0)

    def _ask(self, reader: EntryReader, n: int, plan: Plan) -> None:
        assert reader.now is not None
        reader.now.want(wants_of(plan), n)

    def _timed(self, row: FluxRow, plan: Plan) -> float:
        begin = time.perf_counter()
        self._step(row, plan)
        return time.perf_counter() - begin

    def _step(self, row: FluxRow, plan: Plan) -> None:
        if not self._emulated:
            self.bench.step([row], plan.kinds)
            return
        assert row.entry is not None
        compute = self.planner.costs.model.compute.per_unit
        flops = self.bench.work.block_flops(self.totals)
        for block, kind in enumerate(plan.kinds):
            if plan.loads[block] != "none":
                row.entry.wait(block, plan.loads[block])
            time.sleep(compute * flops[block, KINDS.index(kind)])


def tokens(row: FluxRow) -> RowTokens:
    return RowTokens((float(len(row.latents)),), float(len(row.text)))


def _possible(use: Sequence[bool]) -> list[str]:
    """Algorithm 1's choice as kinds. It holds that a dense block finds inactive tokens anywhere."""
    return ["kv" if cached else "dense" for cached in use]
