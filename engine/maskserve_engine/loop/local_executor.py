"""Rows in the engine's own process."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
    AnchoredRowSpec,
    CachedRowSpec,
    DenseRowSpec,
    LoadState,
    PrimingRowSpec,
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
        self._rows: dict[str, Any] = {}
        self._readers: dict[str, EntryReader | StepCacheReader] = {}
        """Readers of the cached rows, by row."""
        self._template_step_caches: dict[str, StepCacheReader] = {}
        """Readers of step caches beside a template, by row."""
        self._net_caches: dict[str, NetStepCaches] = {}
        """Step caches of the ControlNets that run beside a row."""
        self._still: dict[str, EntryReader] = {}
        """Readers of rows that take their references from a template's entry, by row."""
        self._jobs: dict[str, EditJob] = {}
        """Jobs of all rows."""
        self._step_cache_bytes: dict[str, int] = {}
        """Bytes reserved for rows' step caches."""
        self._adapters: dict[str, LowRankSet] = {}
        self._nets: dict[str, Any] = {}
        self._served: dict[str, ServedRow] = {}
        self._failed_steps = 0

    def load_lora(self, adapter: str, factors: Mapping[str, Factors]) -> int:
        with side_stream(self._adapter.device):
            updates = self._adapter.low_rank(factors)
        self._adapters[adapter] = updates
        return updates.nbytes

    def drop(self, adapter: str) -> None:
        self._adapters.pop(adapter, None)

    def attach(self, row: str, adapters: Sequence[tuple[str, float]]) -> None:
        scaled_sets = tuple([(self._adapters[name], scale) for name, scale in adapters if scale])
        self._adapter.attach(self._rows[row], self._jobs[row], scaled_sets)

    def load_net(self, net: str, folder: NetFolder) -> None:
        model = folder.read()
        with side_stream(self._adapter.device):
            self._nets[net] = self._adapter.control_net(model.to(self._adapter.device))

    def drop_net(self, net: str) -> None:
        self._nets.pop(net, None)
        if self._services is not None:
            self._services.drop(net)

    def read(self, row: str, key: str, anchors: Sequence[Anchor | None]) -> None:
        reader = self._readers[row]
        assert isinstance(reader, EntryReader), "a row with anchors of its own reads no others"
        reader.turn_over(key, anchors)
        if row in self._still:
            self._still[row].turn_over(key, [STILL] * len(anchors))

    def refresh_at(self, row: str, schedule: RefreshSchedule) -> None:
        reader = self._readers.get(row)
        if isinstance(reader, StepCacheReader):  # without room it is a dense row
            reader.refresh_at(schedule)

    def narrow(self, row: str, region: RegionSpec) -> bool:
        row_state, is_first = self._rows[row], row not in self._readers
        tier = self._room(row, region.nbytes) if is_first else None  # a larger region needs no more
        if is_first and tier is None:
            return False
        self._adapter.release()  # the batch was packed for other tokens
        [tokens] = moved((torch.from_numpy(region.tokens),), self._adapter.device)
        row_state.narrow(tokens, region.schedule)
        if tier is not None:
            self._readers[row] = self._step_cache_reader(row_state, tier)
        return True

    def make(self, row: str, spec: RowSpec) -> RowReport:
        adapter = self._adapter
        self._jobs[row] = spec.job
        if isinstance(spec, PrimingRowSpec):
            self._rows[row] = adapter.priming_row(
                spec.job, spec.anchors, spec.prompt, spec.noise_seed, spec.kinds, spec.format
            )
            return RowReport()
        if isinstance(spec, AnchoredRowSpec):
            return self._make_anchored(row, spec)
        if not isinstance(spec, CachedRowSpec):
            dense = adapter.dense_row(spec.job)
            self._control(row, dense, spec.job)
            self._rows[row] = dense
            self._read_still(row, spec.key)
            return RowReport()
        assert self._store is not None, _NO_STORE
        tier = None if spec.schedule is None else self._room(row, spec.nbytes, spare=True)
        refresh_schedule = None if tier is None else spec.schedule
        cached_row = self._with_room(
            row, lambda: adapter.cached_row(spec.job, spec.noise_seed, refresh_schedule)
        )
        self._control(row, cached_row, spec.job, tier)
        selection = cached_row.selection
        assert selection is not None
        reader = EntryReader(self._store, spec.key, spec.anchors, selection, sure=spec.sure)
        self._rows[row], self._readers[row] = cached_row, reader
        if tier is not None:
            self._template_step_caches[row] = self._step_cache_reader(cached_row, tier)
        references_ready = self._read_still(row, spec.key, sure=spec.sure)
        return RowReport(reader.complete and references_ready, selection.digest, refresh_schedule)

    def _read_still(self, row: str, key: str, *, sure: bool = False) -> bool:
        """Let a row read its references from a template, if its references see nothing of the row;
        return whether they can be read now. Otherwise the row makes its own.

        Args:
            row: name of a new row.
            key: cache key of the template; empty: there is none.
            sure: see `EntryReader`.
        """
        references = getattr(self._rows[row], "references", None)
        if references is None or not key or self._store is None:
            return True
        if self._store.locate(key, [STILL]) is None:
            return False
        steps, tokens = self._rows[row].steps, Selection([np.arange(len(references))])
        self._still[row] = EntryReader(self._store, key, [STILL] * steps, tokens, sure=sure)
        return self._still[row].complete

    def _read_fixed_parts(self, row: str, step: int) -> None:
        """Take a row's references from its template, if they can be read now."""
        row_state = self._rows[row]
        if getattr(row_state, "references", None) is None:
            return
        row_state.references.computed = False
        reader = self._still.get(row)
        handle = None if reader is None else reader.turn_to(row_state.step, whole=True)
        if handle is not None:
            handle.want([(block, "kv") for block in range(self._adapter.blocks)], step)
            row_state.references.entry = handle

    def _booked(self, row: str, nbytes: int, *, spare: bool = False) -> bool:
        """Reserve bytes for a row's step cache; return False without room (`MemoryTier.book`)."""
        assert self._store is not None, _NO_STORE
        if nbytes and self._store.memory.book(nbytes, spare=spare):
            self._step_cache_bytes[row] = nbytes
        return row in self._step_cache_bytes

    def _room(self, row: str, nbytes: int, *, spare: bool = False) -> str | None:
        """Return the tier of a row's step cache, whose bytes on the device are then reserved; None:
        there is no room. In host memory it takes the bytes of its blocks in use on the device.
        """
        assert self._store is not None, _NO_STORE
        if self._booked(row, nbytes, spare=spare):
            return DEVICE.name
        rows, in_use = self._store.rows, bytes_in_use(nbytes, self._adapter.entry_blocks)
        if rows.booked + nbytes > rows.budget_bytes:
            return None
        return HOST.name if self._booked(row, in_use, spare=spare) else None

    def _step_cache_reader(self, row: Any, tier: str) -> StepCacheReader:
        blocks = self._adapter.entry_blocks
        return StepCacheReader(row, blocks, self._store, on_host=tier == HOST.name)

    def _with_room(self, row: str, make: Callable[[], Any]) -> Any:
        """Make a row; on an error free the bytes reserved for it."""
        try:
            return make()
        except Exception:
            self._give_back(row)
            raise

    def _give_back(self, row: str) -> None:
        nbytes = self._step_cache_bytes.pop(row, 0)
        if nbytes and self._store is not None:
            self._store.memory.unbook(nbytes)

    def _make_anchored(self, row: str, spec: AnchoredRowSpec) -> RowReport:
        tier = self._room(row, spec.nbytes)
        if tier is None:
            row_made = self.make(row, DenseRowSpec(spec.job, spec.key))
            return row_made._replace(complete=False)
        anchored = self._with_room(row, lambda: self._adapter.anchored_row(spec.job, spec.plan))
        self._control(row, anchored, spec.job, tier)
        self._rows[row], self._readers[row] = anchored, self._step_cache_reader(anchored, tier)
        self._read_still(row, spec.key)
        return RowReport(selection=row.encode())

    def _control(self, row: str, family_row: Any, job: EditJob, tier: str | None = None) -> None:
        """Let a row add the residuals of its ControlNets, wherever these run. The step caches of
        nets beside it lie in the tier of the row's own.
        """
        if not job.controls:
            return
        if self._services is None:
            caches = NetStepCaches(self._store, on_host=tier == HOST.name)
            self._adapter.control(family_row, job, self._nets, caches)
            self._net_caches[row] = caches
        else:
            opening = self._adapter.opening(family_row, job)
            if opening is not None:
                adapters = job.request.settings.adapters
                served = self._served[row] = self._services.open(opening, adapters)
                self._adapter.serve_control(family_row, served)

    def load(
        self, reads: Sequence[Read], devices: tuple[int, ...] = (0,)
    ) -> dict[str, tuple[LoadState, ...]]:
        return self.load_shared(reads, None, by_rank=False)

    def load_shared(
        self, reads: Sequence[Read], heads: Heads | None, *, by_rank: bool
    ) -> dict[str, tuple[LoadState, ...]]:
        """Find what rows read, for a step that ranks share (see `load`).

        Args:
            reads: rows that read entries in this step.
            heads: heads whose keys and values this rank reads when ranks share tokens; None: all.
            by_rank: whether ranks deal the passes.

        Raises:
            ValueError: these heads cannot be cut out of the storage format.
        """
        loads: dict[str, tuple[LoadState, ...]] = {}
        for read in reads:
            step, reader = self._rows[read.row].step, self._readers.get(read.row)
            if reader is None:
                continue  # without room it is a dense row
            handle: Entry | None
            if isinstance(reader, StepCacheReader):
                handle = reader.turn_to(step, heads=heads, by_rank=by_rank)
            else:
                handle = reader.turn_to(step, whole=read.whole, heads=heads)
            step_cache = self._turn_beside(read)
            if handle is not None:
                loads[read.row] = (handle.load, *(() if step_cache is None else (step_cache.load,)))
        return loads

    def _turn_beside(self, read: Read) -> StepCacheEntry | None:
        """Return what a row's next step reads from a step cache beside its template; None: nothing,
        or nothing in host memory.
        """
        reader = self._template_step_caches.get(read.row)
        return None if reader is None else reader.turn_beside(reads=self._frozen(read))

    def _frozen(self, read: Read) -> bool:
        return not read.text and bool(self._rows[read.row].keeps_text)

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
        entries: dict[str, Entry] = {}
        step_caches: list[StepCacheEntry] = []
        for read in step.reads:
            handle = self._readers[read.row].entry
            assert handle is not None, "what a step reads was found by `load`"
            entries[read.row] = handle
            self._rows[read.row].frozen = self._frozen(read)
            reader = self._template_step_caches.get(read.row)
            if reader is not None and reader.entry is not None:
                step_caches.append(reader.entry)
        for name in running:
            self._read_fixed_parts(name, step.number)
        self._ask(step, entries)
        for step_cache in step_caches:
            step_cache.want((), step.number)
        handles = [*entries.values(), *step_caches]
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
        return StepResult(
            tuple(
                [
                    self._after_step(row, read=row in entries, measured=row in step.measured)
                    for row in running
                ]
            ),
            span,
            tuple([s for h, n in zip(handles, earlier, strict=True) for s in h.stalls[n:]]),
            tuple(lost),
            failed,
            () if self._services is None else tuple(self._services.take_waits()),
        )

    def result(self, row: str) -> HostCopy:
        latents: HostCopy = self._rows[row].result()
        return latents

    def estimate(self, row: str) -> HostCopy:
        latents: HostCopy = self._rows[row].estimate()
        return latents

    def keep_entry(self, row: str, key: str, note: Note) -> bool:
        assert self._store is not None, _NO_STORE
        return self._store.put(key, self._rows[row].take_entry(), note)

    def release(self, row: str) -> RowLoads | None:
        self._rows.pop(row, None)
        self._jobs.pop(row, None)
        served = self._served.pop(row, None)
        if served is not None:
            served.close()
        self._give_back(row)
        readers = [
            readers.pop(row)
            for readers in (self._readers, self._template_step_caches, self._net_caches)
            if row in readers
        ]
        reference_reader = self._still.pop(row, None)
        for row_reader in (*readers, *([] if reference_reader is None else [reference_reader])):
            row_reader.release()
        return _RowLoads(tuple(readers)) if readers else None

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
        row_state = self._rows[row]
        return row_state.step, self._adapter.carried(row_state)

    def is_done(self, row: str) -> bool:
        row_state = self._rows[row]
        return bool(row_state.step == row_state.steps)

    def place(self, row: str, steps: int, carried: tuple[Any, ...]) -> None:
        """Set a row to the state that another executor has computed."""
        self._adapter.follow(self._rows[row], carried, steps)

    def _ask(self, step: StepInput, entries: dict[str, Entry]) -> None:
        """Load the parts that the plan reads, and behind them those of later steps."""
        if step.plan is None or step.next_plan is None:
            return
        parts = parts_of(step.plan, step.maps)
        later = parts_of(step.next_plan, step.maps)
        for handle in entries.values():
            handle.want(parts, step.number)
        for row in entries:
            current_step = self._rows[row].step
            ahead = self._readers[row].look_ahead(current_step)
            if ahead is not None:
                handle, at = ahead
                handle.want(later, step.number + at - current_step)

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
                rows = [self._rows[row] for row in running]
                reads = [entries.get(row) for row in running]
                self._adapter.step(rows, step.plan, reads, exchange)
                return
            except EntryLost as error:
                if exchange is not None:
                    raise
                lost_reads = [read for read in step.reads if _is_lost(entries.get(read.row))]
                if not (lost_reads or self._lose_beside(running) or self._lose_still(running)):
                    raise
                _log.warning("a step goes on without an entry: %s", error)
            # outside of `except`, whose error keeps the tensors of the step that was given up
            for read in lost_reads:
                del entries[read.row]
                if read.required:
                    running.remove(read.row)
                    failed[read.row] = EngineFailed(_LOST)
                    continue
                self._readers[read.row].lose()
                lost.append(read.row)

    def _lose_beside(self, running: Sequence[str]) -> bool:
        """Let rows go on without step caches, beside a template or of ControlNets, that do not
        arrive; return whether there were any.
        """
        nets = [self._net_caches[row] for row in running if row in self._net_caches]
        lost_nets = [caches for caches in nets if caches.lost]
        for caches in lost_nets:
            caches.lose()
        lost = [
            row
            for row in running
            if row in self._template_step_caches and _is_lost(self._template_step_caches[row].entry)
        ]
        for row in lost:
            self._template_step_caches[row].lose()
            self._rows[row].frozen = False
        return bool(lost or lost_nets)

    def _lose_still(self, running: Sequence[str]) -> bool:
        """Let rows whose template lost its references make their own; return whether any did."""
        lost = [row for row in running if row in self._still and _is_lost(self._still[row].entry)]
        for row in lost:
            self._still.pop(row).release()
            self._rows[row].references.entry = None
        return bool(lost)

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
                self._adapter.step([self._rows[row]], step.plan, [entries.get(row)])
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

    def _after_step(self, row: str, *, read: bool, measured: bool) -> RowStep:
        row_state = self._rows[row]
        served = self._served.get(row)
        stale = served is not None and served.stale
        text = not (read and row_state.frozen)
        references = getattr(row_state, "references", None)
        new = references is not None and references.computed
        skipped, foresaw = (
            getattr(row_state, "skipped", 0),
            getattr(row_state, "lookahead", None) is not None,
        )
        reader, error = self._readers.get(row), None
        if isinstance(reader, StepCacheReader):
            error = reader.controlling_error(row_state.step - 1)
        change = row_state.change().array() if measured else None
        return RowStep(row, row_state.step, skipped, read, text, stale, new, foresaw, error, change)


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
