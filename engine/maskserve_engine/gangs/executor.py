"""Rows in the processes of several devices (`Executor`).

A row is made on its rank just before its first step. After each step its state (latents of 0.5 MiB
at 1024 x 1024) returns, so that any rank can continue it when a policy moves it or its rank is
lost. Entries do not move: all ranks read the same files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from maskserve_common.contracts.keys import Anchor
from maskserve_common.errors import EngineFailed
from maskserve_engine.adapters.control_net_loader import NetFolder
from maskserve_engine.base.device_clock import Span
from maskserve_engine.batch.step_cache import RefreshSchedule
from maskserve_engine.batch.transfer import HostCopy
from maskserve_engine.cache.store import Store
from maskserve_engine.cache.tier import Note
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.gangs.living_ranks import LivingRanks
from maskserve_engine.gangs.messages import RankLostError, RowAfter, RowPlace, StepAnswer
from maskserve_engine.gangs.processes import RankProcess, RankProcesses
from maskserve_engine.layers.low_rank import Factors
from maskserve_engine.requests.executor import (
    CachedRowSpec,
    LoadState,
    PlainRowSpec,
    PrimingRowSpec,
    Read,
    RegionSpec,
    RowLoads,
    RowReport,
    RowSpec,
    StepDone,
    StepInput,
    StepResult,
)
from maskserve_engine.scheduling.step_scheduler import Devices

_log = logging.getLogger(__name__)
_LOSSES = 3
"""Ranks that a row may lose; at one more, the row counts as the cause."""


@dataclass(eq=False, slots=True)
class _Row:
    name: str
    """Unique name of the row on the ranks, never used again."""
    spec: RowSpec
    adapters: tuple[tuple[str, float], ...] = ()
    """See `Executor.attach`."""
    steps: int = 0
    carried: tuple[Any, ...] | None = None
    """State that a rank needs to continue after `steps`; None: the row begins anew."""
    steps_in_rank: dict[RankProcess, int] = field(default_factory=dict)
    """Steps done in each rank that has the row; -1: unknown."""
    after: RowAfter | None = None
    """Outcome of its last step."""
    losses: int = 0


@dataclass(eq=False, slots=True)
class _RunningStep:
    step: StepInput
    rows: tuple[_Row, ...]
    gang: tuple[RankProcess, ...]
    done: StepDone
    answers: dict[RankProcess, StepAnswer | Exception] = field(default_factory=dict)


class GangExecutor:
    """Steps rows in the processes of several devices; see `Executor`.

    Args:
        ranks: processes that hold the rows.
        adapter: the model, used for questions about edits only.
        store: store of the scheduling process; ranks have stores of their own over its files. None:
            there are no entries.
        post: runs a command on the engine's thread.
        most: most ranks that take a step together; their gangs meet at once, and again when a rank
            has returned.
        deals: whether ranks that take a step together deal its passes (`batch.cfg_parallel`).
    """

    def __init__(
        self,
        ranks: RankProcesses,
        adapter: Adapter,
        store: Store | None,
        post: Callable[[Callable[[], None]], object],
        most: int = 1,
        *,
        deals: bool = False,
    ) -> None:
        self._adapter, self._store, self._deals = adapter, store, deals
        self.rows: dict[str, _Row] = {}
        self._running: list[_RunningStep] = []
        self._names = count()
        self._moves: list[tuple[str, float, float]] = []
        self._idle = True
        self.ranks = LivingRanks(ranks, post, most, self._forget)
        if store is not None:
            store.on_evict = self._evict

    @property
    def devices(self) -> Devices:
        busy = [process.device for step in self._running for process in step.gang]
        return Devices(frozenset(busy), self.ranks.lost)

    def load_lora(self, adapter: str, factors: Mapping[str, Factors]) -> int:
        nbytes = self._adapter.low_rank(factors).nbytes  # or it does not fit
        self.ranks.load_lora(adapter, factors)
        return nbytes

    def drop_lora(self, adapter: str) -> None:
        self.ranks.drop_lora(adapter)

    def attach(self, row: str, adapters: Sequence[tuple[str, float]]) -> None:
        gang_row = self.rows[row]
        gang_row.adapters = tuple(adapters)
        for process in gang_row.steps_in_rank:
            process.call("attach", gang_row.name, gang_row.adapters)

    def load_net(self, net: str, folder: NetFolder) -> None:
        self._adapter.control_net(folder.shape())  # or it does not fit
        self.ranks.load_net(net, folder)

    def drop_net(self, net: str) -> None:
        self.ranks.drop_net(net)

    def switch_entries(self, row: str, key: str, anchors: Sequence[Anchor | None]) -> None:
        gang_row = self.rows[row]
        assert isinstance(gang_row.spec, CachedRowSpec)
        gang_row.spec = replace(gang_row.spec, key=key, anchors=tuple(anchors))
        for process in gang_row.steps_in_rank:
            process.call("switch_entries", gang_row.name, key, gang_row.spec.anchors)

    def refresh_at(self, row: str, schedule: RefreshSchedule) -> None:
        gang_row = self.rows[row]
        assert isinstance(gang_row.spec, PlainRowSpec)
        gang_row.spec = replace(gang_row.spec, schedule=schedule)
        for process in gang_row.steps_in_rank:
            process.call("refresh_at", gang_row.name, schedule)

    def narrow(self, row: str, region: RegionSpec) -> bool:
        raise AssertionError("fronts refuse regions where a worker has several devices")

    def make(self, row: str, spec: RowSpec) -> RowReport:
        """Register a row. A rank makes it with its first step there, and an error then fails the
        row.
        """
        assert row not in self.rows, f"there is a row {row}"
        self.rows[row] = _Row(f"{row}#{next(self._names)}", spec)
        # Rows of one mask and ring read the same tokens; ranks know which.
        refresh_schedule = spec.schedule if isinstance(spec, CachedRowSpec) else None
        return RowReport(
            True, bytes([spec.job.mask_ring]) + spec.job.edit_mask.tobytes(), refresh_schedule
        )

    def load(
        self, reads: Sequence[Read], devices: tuple[int, ...] = (0,)
    ) -> Mapping[str, tuple[LoadState, ...]]:
        gang_rows = [self.rows[read.row] for read in reads]
        gang = self._gang(gang_rows, devices)
        for process in gang:
            self._send_rows(gang_rows, process)
        # Not before: a row that begins anew has another name.
        rows = {row.name: read.row for row, read in zip(gang_rows, reads, strict=True)}
        rank_reads = [
            read._replace(row=row.name) for row, read in zip(gang_rows, reads, strict=True)
        ]
        cuts = self._share_tokens(gang_rows, len(gang))
        shares = [(number, len(gang)) if cuts else None for number in range(len(gang))]
        dealt = len(gang) > 1 and self._deals
        answers = [
            process.call("load", rank_reads, share, dealt)
            for process, share in zip(gang, shares, strict=True)
        ]
        results = [
            self.ranks.wait_for(process, call) for process, call in zip(gang, answers, strict=True)
        ]
        if None in results:
            return {}  # nor will it take the step
        first, *other_results = results
        # If one of them lacks an entry, all do without it.
        return {
            rows[name]: load
            for name, load in first.items()
            if all(name in result for result in other_results)
        }

    def step(self, step: StepInput, done: StepDone) -> None:
        rows = tuple([self.rows[row] for row in step.rows])
        gang = self._gang(rows, step.devices)
        self._begin(_RunningStep(step, rows, gang, done))

    def result(self, row: str) -> HostCopy:
        outcome = self.rows[row].after
        latents = None if outcome is None else outcome.result
        assert latents is not None, "it has taken its last step"
        return HostCopy(latents)

    def estimate(self, row: str) -> HostCopy:
        outcome = self.rows[row].after
        latents = None if outcome is None else outcome.estimate
        assert latents is not None, "its client is shown this step"
        return HostCopy(latents)

    def keep_entry(self, row: str, key: str, note: Note) -> bool:
        outcome = self.rows[row].after  # the rank has put it there as part of the step
        return outcome is not None and outcome.entry_stored

    def release(self, row: str) -> RowLoads | None:
        gang_row = self.rows.pop(row, None)
        if gang_row is None:
            return None
        for process in gang_row.steps_in_rank:
            process.call("release", gang_row.name)
        return None if gang_row.after is None else gang_row.after.loads

    def idle(self) -> None:
        if not self._idle:
            self._idle = True
            self.ranks.call("idle")

    def take_moves(self) -> list[tuple[str, float, float]]:
        moves, self._moves = self._moves, []
        return moves

    def close(self) -> None:
        self.ranks.close()

    # The course of a step.

    def _gang(self, rows: Sequence[_Row], devices: Sequence[int]) -> tuple[RankProcess, ...]:
        """Return the ranks that take a step of these rows: the first alone if the rows cannot be
        shared.
        """
        gang = tuple([self.ranks[device] for device in devices])
        return gang if all(self._may_share(row, len(gang)) for row in rows) else gang[:1]

    def _may_share(self, row: _Row, count: int) -> bool:
        """Whether `count` ranks can take steps of a row together. Priming rows would be recorded in
        parts, and reproducible rows keep to one rank.
        """
        settings = row.spec.job.request.settings
        if count == 1:
            return True
        if isinstance(row.spec, PrimingRowSpec) or settings.reproducible:
            return False
        if self._deals:
            return True
        refreshes = isinstance(row.spec, PlainRowSpec) and row.spec.schedule is not None
        if refreshes and row.spec.job.negative is not None:
            return False  # the other rows of the step decide whether its passes are dealt
        return self._adapter.most_ranks(row.spec.job) >= count

    def _share_tokens(self, reading: Sequence[_Row], count: int) -> bool:
        """Whether a step of these rows, and perhaps others, is shared by tokens and not by passes
        (`families.mmdit.batch`).
        """
        if count == 1 or self._deals or not all(self._may_share(row, count) for row in reading):
            return False
        return count > 2 or any(row.spec.job.negative is None for row in reading)

    def _send_rows(self, rows: Sequence[_Row], process: RankProcess) -> None:
        places = []
        for row in rows:
            if process in row.steps_in_rank and row.steps_in_rank[process] == row.steps:
                continue
            if row.carried is None and (row.steps or process in row.steps_in_rank):
                self._begin_anew(row)
            if process not in row.steps_in_rank:
                process.call("make", row.name, row.spec)
                if row.adapters:
                    process.call("attach", row.name, row.adapters)
            if row.steps and row.carried is not None:
                places.append(RowPlace(row.name, row.steps, row.carried))
            row.steps_in_rank[process] = row.steps
        if places:
            process.call("place", places)

    def _begin_anew(self, row: _Row) -> None:
        """Start a row over: its state was lost with its rank."""
        for process in row.steps_in_rank:
            process.call("release", row.name)
        row.name, row.steps = f"{row.name.partition('#')[0]}#{next(self._names)}", 0
        row.steps_in_rank.clear()

    def _begin(self, step: _RunningStep) -> None:
        self._running.append(step)
        self._idle = False
        for process in step.gang:
            self._send_rows(step.rows, process)
        names = dict(zip(step.step.rows, [row.name for row in step.rows], strict=True))
        rank_step = replace(
            step.step,
            rows=tuple(names.values()),
            reads=tuple([read._replace(row=names[read.row]) for read in step.step.reads]),
        )
        gang = self.ranks.gang_name(step.gang)
        for process in step.gang:
            self.ranks.when_done(
                process.call("step", rank_step, gang), partial(self._on_answer, step, process)
            )

    def _on_answer(
        self, step: _RunningStep, process: RankProcess, answer: Future[StepAnswer]
    ) -> None:
        error = answer.exception()
        if isinstance(error, RankLostError):
            self.ranks.lose(process)
        step.answers[process] = answer.result() if error is None else Exception(str(error))
        if len(step.answers) < len(step.gang):
            return
        self._running.remove(step)
        answers = [reply for reply in step.answers.values() if isinstance(reply, StepAnswer)]
        if len(answers) == len(step.gang):
            self._end(step, step.answers[step.gang[0]])
        else:
            self._try_again(step)

    def _end(self, step: _RunningStep, answer: StepAnswer | Exception) -> None:
        assert isinstance(answer, StepAnswer)
        for item in step.answers.values():
            assert isinstance(item, StepAnswer)
            self._moves += item.moves
            if self._store is not None:
                for tier, nbytes, _ in item.moves:
                    self._store.record_transfer_elsewhere(tier, nbytes)
        for row in step.rows:
            outcome = answer.rows.get(row.name)
            if outcome is None:
                continue
            row.after, row.steps, row.carried = outcome, outcome.step.done, outcome.carried
            if outcome.result is None:
                row.steps_in_rank.update(dict.fromkeys(step.gang, row.steps))
                continue
            for process in (
                row.steps_in_rank.keys() - step.gang
            ):  # where it was before; the gang let it go
                process.call("release", row.name)
            row.steps_in_rank = {}
        ids = {row.name: row_id for row, row_id in zip(step.rows, step.step.rows, strict=True)}
        result = answer.result
        step.done(
            replace(
                result,
                rows=tuple([item._replace(row=ids[item.row]) for item in result.rows]),
                lost=tuple([ids[row] for row in result.lost]),
                failed={ids[row]: error for row, error in result.failed.items()},
                ranks=len(step.gang),
            )
        )

    def _try_again(self, step: _RunningStep) -> None:
        """Recover from a lost rank, or from ranks that disagree: the state of the rows is unknown.
        A remaining rank takes the step alone; without one, rows wait for another.
        """
        for process in step.gang:
            for row in step.rows:
                if process in row.steps_in_rank:
                    row.steps_in_rank[process] = -1
        rows = [(name, row) for name, row in zip(step.step.rows, step.rows, strict=True)
                if self.rows.get(name) is row]  # fmt: skip
        if len(step.gang) > 1:
            self.ranks.part(step.gang)
            survivors = [rank for rank in step.gang if rank in self.ranks]
            if survivors and rows:
                names, gang_rows = zip(*rows, strict=True)
                reads = tuple([read for read in step.step.reads if read.row in names])
                solo_step = replace(
                    step.step, rows=names, reads=reads, devices=(survivors[0].device,)
                )
                self._begin(_RunningStep(solo_step, gang_rows, (survivors[0],), step.done))
            return
        failed = {}
        for name, row in rows:
            row.losses += 1
            if row.losses == _LOSSES:
                failed[name] = EngineFailed(f"{_LOSSES} devices were lost while it ran")
        if failed:
            step.done(StepResult((), Span(0.0, 0.0), failed=failed))

    def _forget(self, process: RankProcess) -> None:
        """Forget which rows a lost rank has."""
        for row in self.rows.values():
            row.steps_in_rank.pop(process, None)

    def _evict(self, key: str) -> None:
        self.ranks.call("evict", key)
