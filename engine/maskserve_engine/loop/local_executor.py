"""Rows in the engine's own process."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from maskserve_common.contracts.keys import STILL, Anchor
from maskserve_common.errors import EngineFailed
from maskserve_common.logs import about
from maskserve_engine.adapters.control_net_loader import NetFolder
from maskserve_engine.base.device_clock import Span, mark
from maskserve_engine.batch.sequence_parallel import Exchange
from maskserve_engine.batch.step_cache import (
    Entry,
    RefreshSchedule,
    StepCacheEntry,
    StepCacheReader,
)
from maskserve_engine.batch.transfer import HostCopy, side_stream
from maskserve_engine.cache.loader import EntryLost
from maskserve_engine.cache.reader import EntryReader, Heads
from maskserve_engine.cache.store import Store
from maskserve_engine.cache.tier import Note
from maskserve_engine.control_link.services import ControlServices
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.layers.low_rank import Factors, LowRankSet
from maskserve_engine.loop.local_rows import NO_STORE, RowMaker, RowRecord, is_lost
from maskserve_engine.loop.step_planner import parts_of
from maskserve_engine.requests.executor import (
    LoadState,
    Read,
    RegionSpec,
    RowLoads,
    RowReport,
    RowSpec,
    StepDone,
    StepInput,
    StepResult,
)
from maskserve_engine.scheduling.step_scheduler import ALL_FREE, Devices

_log = logging.getLogger(__name__)
_LOST = (
    "the template's cached activations were lost while the edit ran, and a reproducible edit "
    "cannot go on without them; send it again"
)
_FAILED_STEPS = 3
"""Steps in a row without a successful row after which the executor gives up."""


class LocalExecutor:
    """See `Executor`.

    Args:
        store: store of the entries; None: no row reads or makes any.
        services: services that run the rows' ControlNets; None: they run in this process.
    """

    devices: Devices = ALL_FREE
    """No device is busy: a step has ended when `step` returns."""

    def __init__(
        self,
        adapter: Adapter,
        store: Store | None = None,
        services: ControlServices | None = None,
    ) -> None:
        self._adapter, self._store, self._services = adapter, store, services
        self._maker = RowMaker(adapter, store, services)
        self.rows: dict[str, RowRecord] = {}
        self._adapters: dict[str, LowRankSet] = {}
        self._failed_steps = 0

    def load_lora(self, adapter: str, factors: Mapping[str, Factors]) -> int:
        with side_stream(self._adapter.device):
            updates = self._adapter.low_rank(factors)
        self._adapters[adapter] = updates
        return updates.nbytes

    def drop_lora(self, adapter: str) -> None:
        self._adapters.pop(adapter, None)

    def attach(self, row: str, adapters: Sequence[tuple[str, float]]) -> None:
        scaled_sets = tuple([(self._adapters[name], scale) for name, scale in adapters if scale])
        record = self.rows[row]
        self._adapter.attach(record.row, record.job, scaled_sets)

    def load_net(self, net: str, folder: NetFolder) -> None:
        model = folder.read()
        with side_stream(self._adapter.device):
            self._maker.nets[net] = self._adapter.control_net(model.to(self._adapter.device))

    def drop_net(self, net: str) -> None:
        self._maker.nets.pop(net, None)
        if self._services is not None:
            self._services.drop(net)

    def switch_entries(self, row: str, key: str, anchors: Sequence[Anchor | None]) -> None:
        record = self.rows[row]
        assert isinstance(record.reader, EntryReader), "a row with refresh steps reads no entries"
        record.reader.switch(key, anchors)
        if record.references is not None:
            record.references.switch(key, [STILL] * len(anchors))

    def refresh_at(self, row: str, schedule: RefreshSchedule) -> None:
        reader = self.rows[row].reader
        if isinstance(reader, StepCacheReader):  # without room it is a dense row
            reader.refresh_at(schedule)

    def narrow(self, row: str, region: RegionSpec) -> bool:
        is_narrowed = self._maker.narrow(self.rows[row], region)
        if is_narrowed:
            self._adapter.release()  # the batch was packed for other tokens
        return is_narrowed

    def make(self, row: str, spec: RowSpec) -> RowReport:
        self.rows[row], report = self._maker.make(spec)
        return report

    def load(
        self,
        reads: Sequence[Read],
        devices: tuple[int, ...] = (0,),
        heads: Heads | None = None,
        *,
        by_rank: bool = False,
    ) -> dict[str, tuple[LoadState, ...]]:
        """See `Executor.load`.

        Args:
            reads: rows that read entries in this step.
            devices: this device.
            heads: heads whose keys and values this rank reads when ranks share tokens; None: all.
            by_rank: whether ranks deal the passes.

        Raises:
            ValueError: these heads cannot be cut out of the storage format.
        """
        requested = [
            (read.row, self.rows[read.row].request(read, heads, by_rank=by_rank)) for read in reads
        ]
        return {row: loads for row, loads in requested if loads}

    def step(self, step: StepInput, done: StepDone) -> None:
        done(self.run(step))

    def run(self, step: StepInput, exchange: Exchange | None = None) -> StepResult:
        """Take one step and return its result.

        Args:
            step: input whose `devices` are this one, or those of `exchange`.
            exchange: exchange with the ranks that take the same step; None: there are none. With
                one, errors are raised, since the ranks must not part.
        """
        running = list(step.rows)
        entries = {read.row: self.rows[read.row].begin(read) for read in step.reads}
        for name in running:
            self.rows[name].read_references(self._adapter.blocks, step.number)
        handles = [*entries.values(), *self._request(step, entries)]
        earlier = [len(handle.stalls) for handle in handles]
        failed: dict[str, EngineFailed] = {}
        lost: list[str] = []
        begin = mark(self._adapter.device)
        try:
            self._step_all(running, step, entries, lost, failed, exchange)
            whole, self._failed_steps = True, 0
        except Exception:
            if exchange is not None:
                raise
            _log.exception("a step of %d rows failed; trying its rows one by one", len(running))
            whole = False
        if not whole:  # outside of `except`, whose error keeps the tensors of the failed step
            self._step_alone(running, step, entries, failed)
        span = Span(begin, mark(self._adapter.device))
        row_steps = [
            self.rows[name].after_step(name, read=name in entries, measured=name in step.measured)
            for name in running
        ]
        return StepResult(
            rows=tuple(row_steps),
            span=span,
            stalls=tuple([s for h, n in zip(handles, earlier, strict=True) for s in h.stalls[n:]]),
            lost=tuple(lost),
            failed=failed,
            control_waits=() if self._services is None else tuple(self._services.take_waits()),
        )

    def result(self, row: str) -> HostCopy:
        latents: HostCopy = self.rows[row].row.result()
        return latents

    def estimate(self, row: str) -> HostCopy:
        latents: HostCopy = self.rows[row].row.estimate()
        return latents

    def keep_entry(self, row: str, key: str, note: Note) -> bool:
        assert self._store is not None, NO_STORE
        return self._store.put(key, self.rows[row].row.take_entry(), note)

    def release(self, row: str) -> RowLoads | None:
        record = self.rows.pop(row, None)
        return None if record is None else record.release()

    def idle(self) -> None:
        self._adapter.release()

    def take_moves(self) -> list[tuple[str, float, float]]:
        return [] if self._store is None else self._store.loader.take_moves()

    def close(self) -> None:
        if self._services is not None:
            self._services.close()

    # For moves of rows from one executor to another.

    def position(self, row: str) -> tuple[int, tuple[Any, ...] | None]:
        """Return (steps taken, further arguments of `place`); see `Adapter.carried`."""
        family_row = self.rows[row].row
        return family_row.step, self._adapter.carried(family_row)

    def is_done(self, row: str) -> bool:
        family_row = self.rows[row].row
        return bool(family_row.step == family_row.steps)

    def place(self, row: str, steps: int, carried: tuple[Any, ...]) -> None:
        """Set a row to the state that another executor has computed."""
        self._adapter.follow(self.rows[row].row, carried, steps)

    def _request(self, step: StepInput, entries: Mapping[str, Entry]) -> list[StepCacheEntry]:
        """Load the parts that the plan reads, and behind them those of later steps. Return what the
        step reads from step caches beside templates, whose loads begin, too.
        """
        if step.plan is None or step.next_plan is None:
            return []
        parts = parts_of(step.plan, step.maps)
        later = parts if step.next_plan is step.plan else parts_of(step.next_plan, step.maps)
        for entry in entries.values():
            entry.want(parts, step.number)
        step_caches = []
        for row in entries:
            record = self.rows[row]
            assert record.reader is not None
            ahead = record.reader.look_ahead(record.row.step)
            if ahead is not None:
                entry, at = ahead
                entry.want(later, step.number + at - record.row.step)
            step_cache = None if record.step_caches is None else record.step_caches.entry
            if step_cache is not None:
                step_cache.want((), step.number)
                step_caches.append(step_cache)
        return step_caches

    def _step_all(
        self,
        running: list[str],
        step: StepInput,
        entries: dict[str, Entry],
        lost: list[str],
        failed: dict[str, EngineFailed],
        exchange: Exchange | None,
    ) -> None:
        """Run the step; if an entry is lost, run it again without the entry."""
        while running:
            try:
                rows = [self.rows[row].row for row in running]
                reads = [entries.get(row) for row in running]
                self._adapter.step(rows, step.plan, reads, exchange)
                return
            except EntryLost as error:
                if exchange is not None:
                    raise
                lost_reads = [read for read in step.reads if is_lost(entries.get(read.row))]
                if not (lost_reads or self._lose_beside(running)):
                    raise
                _log.warning("a step goes on without an entry: %s", error)
            # outside of `except`, whose error keeps the tensors of the step that was given up
            for read in lost_reads:
                del entries[read.row]
                if read.required:
                    running.remove(read.row)
                    failed[read.row] = EngineFailed(_LOST)
                    continue
                self.rows[read.row].lose_entry()
                lost.append(read.row)

    def _lose_beside(self, running: Sequence[str]) -> bool:
        """Let rows go on without step caches or, if none was lost, without their template's
        references; return whether either was lost.
        """
        records = [self.rows[row] for row in running]
        lost_caches = sum([record.lose_step_caches() for record in records])
        return bool(lost_caches or sum([record.lose_references() for record in records]))

    def _step_alone(
        self,
        running: list[str],
        step: StepInput,
        entries: dict[str, Entry],
        failed: dict[str, EngineFailed],
    ) -> None:
        is_row_error = False
        for row in list(running):
            try:
                self._adapter.step([self.rows[row].row], step.plan, [entries.get(row)])
            except EngineFailed as error:  # not the model's fault, and said in words
                running.remove(row)
                failed[row], is_row_error = error, True
            except Exception as error:
                _log.exception("the step of an edit failed", extra=about(row))
                running.remove(row)
                failed[row] = EngineFailed(f"a denoising step failed ({type(error).__name__})")
        self._failed_steps = 0 if running or is_row_error else self._failed_steps + 1
        if self._failed_steps >= _FAILED_STEPS:
            raise RuntimeError(f"{_FAILED_STEPS} steps in a row failed for every row")
