"""Rows in the engine's own process: how they are made, what their steps read, and the steps."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from maskserve_common.contracts.keys import STILL, Anchor
from maskserve_common.contracts.tiers import DEVICE, HOST
from maskserve_common.errors import EngineFailed
from maskserve_common.logs import about
from maskserve_engine.adapters.control_net_loader import NetFolder
from maskserve_engine.base.device_clock import Span, mark
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.sequence_parallel import Exchange
from maskserve_engine.batch.step_cache import (
    Entry,
    NetStepCaches,
    RefreshSchedule,
    StepCacheEntry,
    StepCacheReader,
)
from maskserve_engine.batch.transfer import HostCopy, moved, side_stream
from maskserve_engine.cache.host_cache import bytes_in_use
from maskserve_engine.cache.loader import EntryLost, Selection
from maskserve_engine.cache.reader import EntryReader, Heads
from maskserve_engine.cache.store import Store
from maskserve_engine.cache.tier import Note
from maskserve_engine.control_link.served import ServedRow
from maskserve_engine.control_link.services import ControlServices
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.layers.low_rank import Factors, LowRankSet
from maskserve_engine.loop.step_planner import parts_of
from maskserve_engine.requests.executor import (
    CachedRowSpec,
    LoadState,
    PlainRowSpec,
    Read,
    RegionSpec,
    RowLoads,
    RowReport,
    RowSpec,
    RowStep,
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
_NO_STORE = "only a cache asks for rows that read or make entries"
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
        stall_counts = [len(handle.stalls) for handle in handles]
        failed: dict[str, EngineFailed] = {}
        lost: list[str] = []
        begin = mark(self._adapter.device)
        try:
            self._step_all(running, step, entries, lost, failed, exchange)
            succeeded, self._failed_steps = True, 0
        except Exception:
            if exchange is not None:
                raise
            _log.exception("a step of %d rows failed; trying its rows one by one", len(running))
            succeeded = False
        if not succeeded:  # outside of `except`, whose error keeps the tensors of the failed step
            self._step_alone(running, step, entries, failed)
        span = Span(begin, mark(self._adapter.device))
        row_steps = [
            self.rows[name].after_step(name, read=name in entries, measured=name in step.measured)
            for name in running
        ]
        return StepResult(
            rows=tuple(row_steps),
            span=span,
            stalls=tuple(
                [s for h, n in zip(handles, stall_counts, strict=True) for s in h.stalls[n:]]
            ),
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
        assert self._store is not None, _NO_STORE
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
            next_read = record.reader.look_ahead(record.row.step)
            if next_read is not None:
                entry, step_of_read = next_read
                entry.want(later, step.number + step_of_read - record.row.step)
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
                lost_reads = [read for read in step.reads if _is_lost(entries.get(read.row))]
                if not (lost_reads or self._lose_extras(running)):
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

    def _lose_extras(self, running: Sequence[str]) -> bool:
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


@dataclass(slots=True)
class RowRecord:
    """A row of this process, and the readers of what its steps do not compute."""

    store: Store | None
    job: EditJob
    row: Any = None
    """The family's row."""
    reader: EntryReader | StepCacheReader | None = None
    """Reads the cached tokens; None: the row computes all tokens."""
    step_caches: StepCacheReader | None = None
    """Reads the step cache beside a template; None: there is none."""
    references: EntryReader | None = None
    """Reads the references from a template; None: the row computes them, or has none."""
    nets: NetStepCaches | None = None
    """Step caches of ControlNets that run in this process."""
    served: ServedRow | None = None
    """Its ControlNets at services; None: these run in this process."""
    booked: int = 0
    """Bytes reserved for its step cache on the device."""

    def request(self, read: Read, heads: Heads | None, *, by_rank: bool) -> tuple[LoadState, ...]:
        """Request what the next step reads, and return its loads; empty: it computes all tokens."""
        entry: Entry | None
        if self.reader is None:
            return ()  # without room it is a dense row
        if isinstance(self.reader, StepCacheReader):
            entry = self.reader.entry_at(self.row.step, heads=heads, by_rank=by_rank)
        else:
            entry = self.reader.entry_at(self.row.step, whole=read.whole, heads=heads)
        step_cache = (
            None
            if self.step_caches is None
            else self.step_caches.entry_beside_template(reads=self._leaves_out_text(read))
        )
        if entry is None:
            return ()
        return (entry.load,) if step_cache is None else (entry.load, step_cache.load)

    def _leaves_out_text(self, read: Read) -> bool:
        return not read.text and bool(self.row.has_cached_text)

    def begin(self, read: Read) -> Entry:
        """Prepare the row for a step that reads what was requested, and return its entry."""
        assert self.reader is not None, "what a step reads was found by `load`"
        assert self.reader.entry is not None, "what a step reads was found by `load`"
        self.row.leaves_out_text = self._leaves_out_text(read)
        return self.reader.entry

    def read_references(self, blocks: int, number: int) -> None:
        """Take the references from the template for step `number`, if they can be read now."""
        references = getattr(self.row, "references", None)
        if references is None:
            return
        references.computed = False
        reader = self.references
        entry = None if reader is None else reader.entry_at(self.row.step, whole=True)
        if entry is not None:
            entry.want([(block, "kv") for block in range(blocks)], number)
            references.entry = entry

    def lose_entry(self) -> None:
        """Give up the entry of the present step, which does not arrive."""
        assert self.reader is not None, "only a row that reads entries can lose one"
        self.reader.lose()

    def lose_step_caches(self) -> bool:
        """Go on without step caches, beside a template or of ControlNets, that do not arrive;
        return whether there were any.
        """
        lost_nets = self.nets is not None and self.nets.lost
        if self.nets is not None and lost_nets:
            self.nets.lose()
        lost = self.step_caches is not None and _is_lost(self.step_caches.entry)
        if self.step_caches is not None and lost:
            self.step_caches.lose()
            self.row.leaves_out_text = False
        return lost or lost_nets

    def lose_references(self) -> bool:
        """Compute the references if the template lost them; return whether it has."""
        reader = self.references
        if reader is None or not _is_lost(reader.entry):
            return False
        reader.release()
        self.references = self.row.references.entry = None
        return True

    def after_step(self, name: str, *, read: bool, measured: bool) -> RowStep:
        """Return the outcome of the step just taken.

        Args:
            name: the row's name.
            read: whether it read an entry.
            measured: whether to measure the row's change from its source.
        """
        row, reader, error = self.row, self.reader, None
        references = getattr(row, "references", None)
        if isinstance(reader, StepCacheReader):
            error = reader.controlling_error(row.step - 1)
        return RowStep(
            name,
            row.step,
            read,
            text=not (read and row.leaves_out_text),
            stale=self.served is not None and self.served.stale,
            computed_references=references is not None and references.computed,
            looked_ahead=getattr(row, "lookahead", None) is not None,
            refresh_error=error,
            change=row.change().array() if measured else None,
        )

    def release(self) -> RowLoads | None:
        """Release what the row holds; return the loads of a cached row."""
        if self.served is not None:
            self.served.close()
        if self.booked and self.store is not None:
            self.store.memory.unbook(self.booked)
        readers = [
            reader for reader in (self.reader, self.step_caches, self.nets) if reader is not None
        ]
        for reader in (*readers, *([] if self.references is None else [self.references])):
            reader.release()
        return _RowLoads(tuple(readers)) if readers else None


class RowMaker:
    """Makes rows and their readers, and reserves memory for their step caches.

    Args:
        store: store of the entries; None: no row reads or makes any.
        services: services that run the rows' ControlNets; None: they run in this process.
    """

    def __init__(
        self, adapter: Adapter, store: Store | None, services: ControlServices | None
    ) -> None:
        self._adapter, self._store, self._services = adapter, store, services
        self.nets: dict[str, Any] = {}
        """ControlNets of this process, by name."""

    def make(self, spec: RowSpec) -> tuple[RowRecord, RowReport]:
        """Raises whatever went wrong; nothing is reserved then."""
        record = RowRecord(self._store, spec.job)
        try:
            return record, self._fill(record, spec)
        except Exception:
            record.release()
            raise

    def narrow(self, record: RowRecord, region: RegionSpec) -> bool:
        """See `Executor.narrow`."""
        is_first = record.reader is None
        # A larger region needs no more memory than the first one.
        tier = self._reserve(record, region.nbytes) if is_first else None
        if is_first and tier is None:
            return False
        [tokens] = moved((torch.from_numpy(region.tokens),), self._adapter.device)
        record.row.narrow(tokens, region.schedule)
        if tier is not None:
            record.reader = self._step_cache_reader(record.row, tier)
        return True

    def _fill(self, record: RowRecord, spec: RowSpec) -> RowReport:
        """Make the row of a new record, and its readers."""
        if isinstance(spec, PlainRowSpec):
            return self._fill_plain(record, spec)
        if isinstance(spec, CachedRowSpec):
            return self._fill_cached(record, spec)
        record.row = self._adapter.priming_row(
            spec.job, spec.anchors, spec.prompt, spec.noise_seed, spec.kinds, spec.format
        )
        return RowReport()

    def _fill_plain(self, record: RowRecord, spec: PlainRowSpec) -> RowReport:
        schedule, tier = spec.schedule, None
        if schedule is not None:
            tier = self._reserve(record, spec.nbytes)
        if schedule is None or tier is None:
            record.row = self._adapter.dense_row(spec.job)
        else:
            record.row = self._adapter.refreshing_row(spec.job, schedule)
            record.reader = self._step_cache_reader(record.row, tier)
        self._control(record, tier)
        self._read_references(record, spec.key)
        return RowReport(complete=schedule is None or tier is not None)

    def _fill_cached(self, record: RowRecord, spec: CachedRowSpec) -> RowReport:
        assert self._store is not None, _NO_STORE
        planned, tier = spec.schedule, None
        if planned is not None:
            tier = self._reserve(record, spec.nbytes, spare=True)
        schedule = None if tier is None else planned
        record.row = self._adapter.cached_row(spec.job, spec.noise_seed, schedule)
        self._control(record, tier)
        selection = record.row.selection
        reader = EntryReader(self._store, spec.key, spec.anchors, selection, force=spec.force)
        record.reader = reader
        if tier is not None:
            record.step_caches = self._step_cache_reader(record.row, tier)
        references_ready = self._read_references(record, spec.key, force=spec.force)
        return RowReport(reader.complete and references_ready, selection.digest, schedule)

    def _read_references(self, record: RowRecord, key: str, *, force: bool = False) -> bool:
        """Let a new row read its references from a template, if its references see nothing of the
        row; return whether they can be read now. Otherwise the row makes its own.

        Args:
            record: the row.
            key: cache key of the template; empty: there is none.
            force: see `EntryReader`.
        """
        references = getattr(record.row, "references", None)
        if references is None or not key or self._store is None:
            return True
        if self._store.locate(key, [STILL]) is None:
            return False
        steps, tokens = record.row.steps, Selection([np.arange(len(references))])
        reader = EntryReader(self._store, key, [STILL] * steps, tokens, force=force)
        record.references = reader
        return reader.complete

    def _reserve(self, record: RowRecord, nbytes: int, *, spare: bool = False) -> str | None:
        """Reserve memory for a row's step cache (`MemoryTier.book`), and return its tier; None:
        there is no room. In host memory it takes the bytes of its blocks in use on the device.
        """
        assert self._store is not None, _NO_STORE
        memory, rows = self._store.memory, self._store.rows
        in_use = bytes_in_use(nbytes, self._adapter.entry_blocks)
        if nbytes and memory.book(nbytes, spare=spare):
            record.booked = nbytes
            return DEVICE.name
        if not in_use or rows.booked + nbytes > rows.budget_bytes:
            return None
        if not memory.book(in_use, spare=spare):
            return None
        record.booked = in_use
        return HOST.name

    def _step_cache_reader(self, row: Any, tier: str) -> StepCacheReader:
        blocks = self._adapter.entry_blocks
        return StepCacheReader(row, blocks, self._store, on_host=tier == HOST.name)

    def _control(self, record: RowRecord, tier: str | None) -> None:
        """Let a row add the residuals of its ControlNets, wherever these run. The step caches of
        nets beside it lie in the tier of the row's own.
        """
        row, job = record.row, record.job
        if not job.controls:
            return
        if self._services is None:
            record.nets = NetStepCaches(self._store, on_host=tier == HOST.name)
            self._adapter.control(row, job, self.nets, record.nets)
            return
        opening = self._adapter.opening(row, job)
        if opening is not None:
            record.served = self._services.open(opening, job.request.settings.adapters)
            self._adapter.serve_control(row, record.served)


@dataclass(frozen=True, slots=True)
class _RowLoads:
    """Loads of all readers of a row."""

    readers: tuple[RowLoads, ...]

    @property
    def loaded(self) -> Mapping[str, int]:
        loaded = Counter[str]()
        for reader in self.readers:
            loaded.update(reader.loaded)
        return loaded

    @property
    def stalled(self) -> float:
        return sum(reader.stalled for reader in self.readers)

    @property
    def out_of_memory(self) -> bool:
        return any(reader.out_of_memory for reader in self.readers)

    @property
    def refresh_errors(self) -> Mapping[int, float]:
        errors: dict[int, float] = {}
        for reader in self.readers:
            errors.update(reader.refresh_errors)
        return errors


def _is_lost(handle: Entry | None) -> bool:
    return handle is not None and handle.load.lost is not None
