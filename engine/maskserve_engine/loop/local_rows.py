"""Rows in this process: how they are made, and what their steps read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from maskserve_common.contracts.keys import STILL
from maskserve_common.contracts.tiers import DEVICE, HOST
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.step_cache import (
    Entry,
    NetStepCaches,
    StepCacheReader,
)
from maskserve_engine.batch.transfer import moved
from maskserve_engine.cache.host_cache import bytes_in_use
from maskserve_engine.cache.loader import Selection
from maskserve_engine.cache.reader import EntryReader, Heads
from maskserve_engine.cache.store import Store
from maskserve_engine.control_link.served import ServedRow
from maskserve_engine.control_link.services import ControlServices
from maskserve_engine.families.adapter import Adapter
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
)

NO_STORE = "only a cache asks for rows that read or make entries"


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
            entry = self.reader.turn_to(self.row.step, heads=heads, by_rank=by_rank)
        else:
            entry = self.reader.turn_to(self.row.step, whole=read.whole, heads=heads)
        step_cache = (
            None
            if self.step_caches is None
            else self.step_caches.turn_beside(reads=self._frozen(read))
        )
        if entry is None:
            return ()
        return (entry.load,) if step_cache is None else (entry.load, step_cache.load)

    def _frozen(self, read: Read) -> bool:
        return not read.text and bool(self.row.keeps_text)

    def begin(self, read: Read) -> Entry:
        """Prepare the row for a step that reads what was requested, and return its entry."""
        assert self.reader is not None, "what a step reads was found by `load`"
        assert self.reader.entry is not None, "what a step reads was found by `load`"
        self.row.frozen = self._frozen(read)
        return self.reader.entry

    def read_references(self, blocks: int, number: int) -> None:
        """Take the references from the template for step `number`, if they can be read now."""
        references = getattr(self.row, "references", None)
        if references is None:
            return
        references.computed = False
        reader = self.references
        entry = None if reader is None else reader.turn_to(self.row.step, whole=True)
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
        lost = self.step_caches is not None and is_lost(self.step_caches.entry)
        if self.step_caches is not None and lost:
            self.step_caches.lose()
            self.row.frozen = False
        return lost or lost_nets

    def lose_references(self) -> bool:
        """Compute the references if the template lost them; return whether it has."""
        reader = self.references
        if reader is None or not is_lost(reader.entry):
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
            getattr(row, "skipped", 0),
            read,
            text=not (read and row.frozen),
            stale=self.served is not None and self.served.stale,
            computed_references=references is not None and references.computed,
            foresaw=getattr(row, "lookahead", None) is not None,
            refresh_error=error,
            change=row.change().array() if measured else None,
        )

    def release(self) -> RowLoads | None:
        """Release what the row holds; return the loads of a cached row."""
        if self.served is not None:
            self.served.close()
        if self.booked and self.store is not None:
            self.store.memory.unbook(self.booked)
        readers = [one for one in (self.reader, self.step_caches, self.nets) if one is not None]
        for one in (*readers, *([] if self.references is None else [self.references])):
            one.release()
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
            record.row = self._adapter.anchored_row(spec.job, schedule)
            record.reader = self._step_cache_reader(record.row, tier)
        self._control(record, tier)
        self._read_references(record, spec.key)
        return RowReport(complete=schedule is None or tier is not None)

    def _fill_cached(self, record: RowRecord, spec: CachedRowSpec) -> RowReport:
        assert self._store is not None, NO_STORE
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
        assert self._store is not None, NO_STORE
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


def is_lost(handle: Entry | None) -> bool:
    return handle is not None and handle.load.lost is not None
