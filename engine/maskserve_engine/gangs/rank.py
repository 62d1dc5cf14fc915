"""`python -m maskserve_engine.gangs.rank FD`: a process with the model and some rows on one device.
It runs the calls that arrive through its pipe, one after the other.

When the pipe ends, the process ends at once, even during a call.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed

from maskserve_common.config import Config
from maskserve_common.contracts.keys import STILL, Anchor
from maskserve_common.errors import EngineFailed
from maskserve_common.garbage import without_garbage_collection
from maskserve_common.logs import about, start_log
from maskserve_engine.adapters.control_net_loader import NetFolder
from maskserve_engine.adapters.fuse import served_form
from maskserve_engine.base.device_clock import Span
from maskserve_engine.batch.sequence_parallel import GangExchange, share_of
from maskserve_engine.batch.step_cache import RefreshSchedule
from maskserve_engine.batch.transfer import moved
from maskserve_engine.cache.tier import Note
from maskserve_engine.families.registry import load_adapter
from maskserve_engine.families.specs import filled_threads
from maskserve_engine.fitting.card_table import check_fits
from maskserve_engine.fitting.entry_store import (
    estimated_costs,
    open_mover,
    open_store,
    template_layout,
)
from maskserve_engine.fitting.memory import device_memory, memory_table
from maskserve_engine.gangs.messages import (
    DeviceDescription,
    EntryLoad,
    EntryLoads,
    Hello,
    RankAnswer,
    RankCall,
    RowAfter,
    RowPlace,
    StepAnswer,
    receive,
    send,
)
from maskserve_engine.layers.low_rank import Factors
from maskserve_engine.loop.local_executor import LocalExecutor
from maskserve_engine.loop.measured_costs import MeasuredCosts
from maskserve_engine.loop.step_planner import StepPlanner
from maskserve_engine.loop.warm_up import warm_up
from maskserve_engine.planning.degree_costs import ExchangeCosts
from maskserve_engine.requests.executor import (
    CachedRowSpec,
    PrimingRowSpec,
    Read,
    RowSpec,
    RowStep,
    StepInput,
    StepResult,
)
from maskserve_engine.scheduling.policies import policy_of
from maskserve_engine.stages.cpu_threads import limit_threads, one_cpu_thread
from maskserve_engine.stages.loader import device_in_words, device_of, dtype_of
from maskserve_engine.stages.revision import model_revision
from maskserve_engine.stages.unused_libraries import hide_unused_libraries

_log = logging.getLogger(__name__)
_EXCHANGE_S = 20.0
"""Seconds after which an exchange with other ranks has failed."""
_PROBES, _PROBE_BYTES = 9, 2**22
_OPEN_S = 2.0
"""Seconds that a row waits for its template's files to open; then it runs without them."""


class Rank:
    """The calls of a rank, which `GangExecutor` makes.

    Args:
        config: configuration of the worker, with this rank's device.
    """

    def __init__(self, config: Config) -> None:
        _log.info("a rank's device: %s", device_in_words(config))
        self._config, self.device = config, device_of(config)
        if self.device.type == "cuda":
            check_fits(config, device_memory(self.device)[1])
        with one_cpu_thread():
            adapter = load_adapter(config)
        mover = open_mover(config)
        costs = estimated_costs(config, mover)
        kinds, size = template_layout(config, adapter, costs)
        memory = memory_table(config, adapter, size)
        # On a CPU, all ranks share one memory.
        ranks = 1 if self.device.type == "cuda" else config.engine.devices
        self._store = open_store(config, size, costs, memory.cache // ranks, mover)
        self._local = LocalExecutor(adapter, self._store)
        self.adapter = adapter
        if config.engine.warm_up:
            planner = StepPlanner(MeasuredCosts(costs))
            cache_parts = (self._store, kinds) if config.cache.enabled else None
            warm_up(config, adapter, cache_parts, planner)
        self._specs: dict[str, RowSpec] = {}
        self._unmade: dict[str, EngineFailed] = {}
        """Errors of rows that could not be made."""
        self._primed_s: dict[str, float] = {}
        """Seconds of the steps so far of each priming row."""
        self._gangs: dict[str, GangExchange] = {}
        self._nets: dict[str, Future[None]] = {}
        """Loads of ControlNets, done or under way; no step waits for them."""
        self._net_reader = ThreadPoolExecutor(1, "controlnets")
        revision = model_revision(config.model.path, served_form(config))
        dtype = str(dtype_of(config)).removeprefix("torch.")
        self.hello = Hello(DeviceDescription(costs, memory), dtype, revision)

    def join(self, gang: str, rank: int, count: int, port: int) -> ExchangeCosts:
        """Meet the other ranks of a gang; return the measured costs of exchanges with them.

        Args:
            gang: name that no other gang has had.
            rank: this rank's number in the gang.
            count: number of ranks in the gang.
            port: port of the store at which ranks meet.
        """
        stores: Any = distributed  # torch's stubs lack its stores
        store = stores.PrefixStore(gang, stores.TCPStore("127.0.0.1", port))
        deals = policy_of(self._config.engine).deals
        exchange = GangExchange(store, rank, count, self.device, _EXCHANGE_S, deals=deals)
        self._agree(exchange, 0)
        self._gangs[gang] = exchange
        call_s = self._exchange_seconds(exchange, 1)
        bulk_s = max(self._exchange_seconds(exchange, _PROBE_BYTES // count) - call_s, 1e-9)
        sent_bytes = _PROBE_BYTES * (count - 1) / count
        return ExchangeCosts(sent_bytes / bulk_s, call_s, dtype_of(self._config).itemsize)

    def leave(self, gang: str) -> None:
        self._gangs.pop(gang, None)

    def make(self, row: str, spec: RowSpec) -> None:
        self._specs[row] = spec
        try:
            for control in spec.job.controls:
                if control.net in self._nets:  # a net that acts in no step may not be loaded here
                    self._nets[control.net].result()
            if isinstance(spec, CachedRowSpec):
                self._open(spec.key, spec.anchors)
            elif isinstance(spec, PrimingRowSpec):
                # The second half of a template must not evict its first half.
                self._store.memory.pin(spec.key, pinned=True)
                self._primed_s[row] = 0.0
            row_made = self._local.make(row, spec)
            if isinstance(spec, CachedRowSpec) and spec.force and not row_made.complete:
                raise EngineFailed("the template's cached activations were lost; send it again")
        except Exception as error:
            _log.exception("a row could not be made", extra=about(row))
            engine_error = error if isinstance(error, EngineFailed) else None
            self._unmade[row] = engine_error or EngineFailed(
                f"its row failed ({type(error).__name__})"
            )

    def load_lora(self, adapter: str, factors: Mapping[str, Factors]) -> None:
        self._local.load_lora(adapter, factors)

    def drop_lora(self, adapter: str) -> None:
        self._local.drop_lora(adapter)

    def load_net(self, net: str, folder: NetFolder) -> Future[None]:
        """Load a ControlNet; the future is done when it is on the device."""
        self._nets[net] = self._net_reader.submit(self._local.load_net, net, folder)
        return self._nets[net]

    def drop_net(self, net: str) -> None:
        self._nets.pop(net, None)
        self._net_reader.submit(self._local.drop_net, net)

    def attach(self, row: str, adapters: Sequence[tuple[str, float]]) -> None:
        self._change(row, lambda: self._local.attach(row, adapters))

    def switch_entries(self, row: str, key: str, anchors: Sequence[Anchor | None]) -> None:
        def open_and_switch() -> None:
            self._open(key, anchors)
            self._local.switch_entries(row, key, anchors)

        self._change(row, open_and_switch)

    def refresh_at(self, row: str, schedule: RefreshSchedule) -> None:
        self._change(row, partial(self._local.refresh_at, row, schedule))

    def place(self, places: Sequence[RowPlace]) -> None:
        """Set rows to the state that other ranks have computed."""
        for row, steps, carried in places:
            self._change(row, partial(self._local.place, row, steps, moved(carried, self.device)))

    def load(
        self, reads: Sequence[Read], share: tuple[int, int] | None, by_rank: bool
    ) -> dict[str, tuple[EntryLoad, ...]]:
        """See `Executor.load`.

        Args:
            reads: reads by the rows' names on this rank.
            share: (rank, count) if the ranks of a gang share tokens; each then reads only the keys
                and values of its heads.
            by_rank: whether the ranks deal passes.
        """
        ready_reads = [read for read in reads if self._exists(read.row)]
        heads = int(self.adapter.spec.denoiser["num_attention_heads"]) if share else 0
        cut = None if share is None else (*share_of(heads, *share), heads)
        try:
            loads = self._local.load(ready_reads, heads=cut, by_rank=by_rank)
        except ValueError:  # entries of this format cannot be cut by heads
            loads = self._local.load(ready_reads)
        entry_loads: dict[int, EntryLoad] = {}
        for load in chain.from_iterable(loads.values()):  # rows may share one
            entry_loads.setdefault(id(load), EntryLoad(load.tier, load.sizes, load.missing))
        return {
            row: tuple([entry_loads[id(load)] for load in row_loads])
            for row, row_loads in loads.items()
        }

    def step(self, step: StepInput, gang: str) -> StepAnswer:
        """Take one step; `gang` names the ranks that share it, and is empty for this rank alone."""
        absent = EngineFailed("its row could not be moved to a device")
        unmade = {
            row: self._unmade.get(row, absent)
            for row in step.rows
            if row in self._unmade or row not in self._specs
        }
        if gang:
            exchange = self._gangs[gang]
            reading = [read.row for read in step.reads]
            self._agree(
                exchange, zlib.crc32(repr((step.number, step.rows, reading, unmade)).encode())
            )
            if unmade:
                raise EngineFailed("rows of the step could not be made")
            result = self._local.run(step, exchange)
            reports = exchange.rank == 0
        else:
            rows = tuple([row for row in step.rows if row not in unmade])
            reads = tuple([read for read in step.reads if read.row not in unmade])
            loaded = self._local.load(reads)  # all heads, also if a gang was to take the step
            reads = tuple([read for read in reads if read.row in loaded])
            result, reports = self._local.run(replace(step, rows=rows, reads=reads)), True
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        local_result = StepResult(
            result.rows,
            Span(0.0, result.span.seconds() or 0.0),
            tuple([Span(0.0, stall.seconds() or 0.0) for stall in result.stalls]),
            result.lost,
            {**result.failed, **unmade},
        )
        outcomes = [self._after(step, local_result.span, reports=reports) for step in result.rows]
        rows_after = {outcome.step.row: outcome for outcome in outcomes}
        return StepAnswer(local_result, rows_after if reports else {}, self._local.take_moves())

    def release(self, row: str) -> None:
        self._local.release(row)
        spec = self._specs.pop(row, None)
        self._unmade.pop(row, None)
        if self._primed_s.pop(row, None) is not None and isinstance(spec, PrimingRowSpec):
            self._store.memory.pin(spec.key, pinned=False)

    def evict(self, key: str) -> None:
        self._store.memory.evict(key)

    def idle(self) -> None:
        self._local.idle()

    def _after(self, step: RowStep, took: Span, *, reports: bool) -> RowAfter:
        """Return what the engine's process gets of a row after its step; release the row if it is
        done.
        """
        row, spec = step.row, self._specs[step.row]
        if isinstance(spec, PrimingRowSpec):
            self._primed_s[row] += took.seconds() or 0.0
            return RowAfter(step, (), entry_stored=self._keep(step, spec))
        if self._local.is_done(row):
            result = torch.from_numpy(self._local.result(row).array()) if reports else None
            loads = self._local.release(row)
            self.release(row)
            entry_loads = None
            if loads is not None:
                entry_loads = EntryLoads(
                    dict(loads.loaded),
                    loads.stalled,
                    loads.out_of_memory,
                    dict(loads.refresh_errors),
                )
            return RowAfter(step, None, result, entry_loads)
        carried = self._local.position(row)[1] if reports else None
        preview_every = spec.job.request.settings.preview_every
        preview = None
        if reports and preview_every and step.done % preview_every == 0:
            preview = torch.from_numpy(self._local.estimate(row).array())
        return RowAfter(step, carried, None, None, preview)

    def _keep(self, step: RowStep, spec: PrimingRowSpec) -> bool:
        """Store the entry that a priming row has recorded, and return whether its file is written:
        other ranks read the file.
        """
        whole_s = self._primed_s[step.row] / step.done * len(spec.anchors)
        note = Note(spec.job.request.template_id, len(spec.anchors), whole_s)
        if not self._local.keep_entry(step.row, spec.key, note):
            return False
        self._store.settle()
        return self._store.lower.locate(spec.key, [spec.anchors[step.done - 1]]) is not None

    def _open(self, key: str, anchors: Sequence[Anchor | None]) -> None:
        """Open a template's files before a row that reads them is made."""
        static_anchors = [STILL] if self.adapter.spec.semantics.exact else []
        required = dict.fromkeys((*static_anchors, *anchors))
        if not self._store.fetch(key, [anchor for anchor in required if anchor is not None]):
            self._store.settle(_OPEN_S)

    def _exchange_seconds(self, exchange: GangExchange, nbytes: int) -> float:
        """Return the median seconds of a few exchanges of `nbytes` bytes with each rank."""
        parts = [torch.zeros(nbytes, dtype=torch.uint8, device=self.device)] * exchange.count
        took = []
        for _ in range(_PROBES):
            begin = time.perf_counter()
            exchange.all_to_all(parts, [nbytes] * exchange.count)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            took.append(time.perf_counter() - begin)
        return sorted(took)[_PROBES // 2]

    def _change(self, row: str, change: Callable[[], None]) -> None:
        """Change a row of this rank; on an error it counts as not made."""
        try:
            if self._exists(row):
                change()
        except Exception as error:
            _log.exception("a row could not be changed", extra=about(row))
            self._unmade[row] = EngineFailed(f"its row failed ({type(error).__name__})")

    def _exists(self, row: str) -> bool:
        return row in self._specs and row not in self._unmade

    def _agree(self, exchange: GangExchange, number: int) -> None:
        """Check that all ranks of a gang begin the same step."""
        numbers = torch.full((exchange.count,), number, dtype=torch.int64, device=self.device)
        received = exchange.all_to_all(list(numbers.split(1)), [1] * exchange.count)
        if not bool((received == number).all()):
            raise EngineFailed(f"ranks are out of step: {received.tolist()}")


def main(pipe: Connection) -> None:
    """Serve the pipe until it ends."""
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        try:
            while True:
                calls.put(receive(pipe))
        except (EOFError, OSError):
            os._exit(0)  # the engine's process has ended
        except BaseException:
            # Otherwise `main` would wait for calls for ever.
            sys.excepthook(*sys.exc_info())
            os._exit(1)

    threading.Thread(target=read, name="calls", daemon=True).start()
    config = calls.get()
    start_log(config, "denoiser")
    hide_unused_libraries(config, text=False)
    lock = threading.Lock()

    def report(answer: RankAnswer) -> None:
        with lock:
            send(pipe, answer)

    try:
        with without_garbage_collection():
            rank = Rank(config)
    except Exception as error:
        _log.exception("a rank could not start")
        report(RankAnswer(0, None, f"{error}"))
        return
    report(RankAnswer(0, rank.hello))
    limit_threads(config, filled_threads(config, rank.adapter.spec))
    with rank.adapter.session():
        expected = 1
        while True:
            call: RankCall = calls.get()
            assert call.number == expected, f"call {call.number} came in place of {expected}"
            expected += 1
            _do(rank, call, report)


def _do(rank: Rank, call: RankCall, report: Callable[[RankAnswer], None]) -> None:
    """Run a call and answer it at once, or when its future is done."""
    try:
        value = getattr(rank, call.verb)(*call.arguments)
    except Exception as error:
        if call.verb == "step" and not call.arguments[1]:
            raise  # a step without other ranks must not fail: this process is broken
        report(_failed(call, error))
        return
    if not isinstance(value, Future):
        report(RankAnswer(call.number, value))
        return

    def done(future: Future[Any]) -> None:
        error = future.exception()
        report(RankAnswer(call.number, future.result()) if error is None else _failed(call, error))

    value.add_done_callback(done)


def _failed(call: RankCall, error: BaseException) -> RankAnswer:
    _log.error("%s failed", call.verb, exc_info=error)
    return RankAnswer(call.number, None, f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
