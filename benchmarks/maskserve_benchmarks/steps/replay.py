"""Cached rows whose entries are held in memory, stepped without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np

from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.sequence_parallel import Exchange
from maskserve_engine.batch.step_cache import RefreshSchedule
from maskserve_engine.cache.entries import PARTS, AnchorEntry, Coded
from maskserve_engine.cache.entry_file import EntrySource
from maskserve_engine.cache.loader import Arrival, HostMover, Load, Loader, Selection
from maskserve_engine.cache.store import Handle
from maskserve_engine.families.adapter import Adapter, EditRow
from maskserve_engine.planning.two_stream import Plan, StepCosts, evaluate


class _Reads(NamedTuple):
    row: EditRow
    """Kept alive so that no other row gets its id."""
    entries: tuple[AnchorEntry | None, ...]
    handles: list[Handle | None]


class Replay:
    """Gives each row of an adapter, before each step, the entry that it reads.

    Args:
        adapter: adapter of the rows.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self._reads: dict[int, _Reads] = {}

    def cached_row(
        self,
        job: EditJob,
        entries: Sequence[AnchorEntry | None],
        noise_seed: int,
        schedule: RefreshSchedule | None = None,
    ) -> EditRow:
        """Return a cached row that reads `entries`, one per step."""
        row = self.adapter.cached_row(job, noise_seed, schedule)
        self.reads(row, entries)
        return row

    def reads(self, row: EditRow, entries: Sequence[AnchorEntry | None]) -> None:
        """Set the entries that a row reads, one per step."""
        selection = row.selection
        assert selection is not None
        handle_by_id = {id(e): in_memory(e, selection) for e in entries if e is not None}
        handles = [handle_by_id.get(id(entry)) for entry in entries]
        self._reads[id(row)] = _Reads(row, tuple(entries), handles)

    def entries(self, row: EditRow) -> tuple[AnchorEntry | None, ...]:
        """Return the entries that a row reads, one per step."""
        return self._reads[id(row)].entries

    def follow(self, row: EditRow, other: EditRow) -> None:
        """Let `row` read the same entries as `other`, with its own tokens, if `other` reads any."""
        if id(other) in self._reads:
            self.reads(row, self.entries(other))

    def next_read(self, row: EditRow) -> Handle | None:
        """Return the entry that the row's next step reads."""
        reads = self._reads.get(id(row))
        return None if reads is None else reads.handles[row.step]

    def step(
        self, rows: Sequence[EditRow], kinds: Sequence[str], exchange: Exchange | None = None
    ) -> None:
        """Take one step; cached rows run block i as `kinds[i]`."""
        reads = [self.next_read(row) for row in rows]
        self.adapter.step(rows, plan_of_kinds(kinds) if kinds else None, reads, exchange)


def in_memory(entry: AnchorEntry, selection: Selection, *, whole: bool = False) -> Handle:
    """Return a handle to an entry that is fully loaded. It holds the row's tokens, or with `whole`
    all tokens, as for entries on the device.
    """
    load = Load(entry, "device", None if whole else selection)
    for block in range(len(entry.blocks)):
        for part in PARTS:
            if coded := cast(tuple[Coded, ...], load.parts(block, part)):
                ids = selection.on(block, coded[0].data.device)
                row_parts = coded if whole else tuple(c.take(ids) for c in coded)
                load.arrive((block, part), Arrival(row_parts))
    source = EntrySource(entry, "device", "device")
    return Handle(entry.anchor, load, source, Loader(HostMover()), selection, lambda: None)


def plan_of_kinds(kinds: Sequence[str]) -> Plan:
    """Return a plan that runs block i as `kinds[i]`, without real timings."""
    n = len(kinds)
    costs = StepCosts(np.ones((n, 3)), np.ones((n, 2)), np.zeros(n))
    return evaluate(costs, kinds, lead=0.0)


class WithoutLookahead(RefreshSchedule):
    """A rival: a row computes its refresh steps when it arrives there, and steps behind the last
    two extrapolate from them.
    """

    __slots__ = ()

    @property
    def dense(self) -> frozenset[int]:
        return self.refresh_steps

    @property
    def computed_at(self) -> frozenset[int]:
        return self.refresh_steps

    def next_refresh(self, step: int) -> int | None:
        return None


def refreshed_every(every: int, steps: int) -> RefreshSchedule:
    """Return the schedule of a row whose ControlNets compute all tokens every `every` steps."""
    return WithoutLookahead(frozenset(range(0, steps, every)), "model", text=False)
