"""One step of the batch: turn to what it reads, plan, run, let finished rows leave."""

from __future__ import annotations

import logging
from collections import Counter
from typing import NamedTuple

from maskserve_core.config import Config
from maskserve_core.contracts.entry_key import Anchor
from maskserve_core.errors import EngineFailed
from maskserve_core.planning.flops import ModelWork, Totals
from maskserve_core.worker.logs import about
from maskserve_core.worker.observations import Observations
from maskserve_engine.cache.handle import Handle
from maskserve_engine.cache.loader import EntryLost
from maskserve_engine.cache.reader import EntryReader
from maskserve_engine.counted_work import CountedWork
from maskserve_engine.device_clock import Span, mark
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.job import Preview, Progress
from maskserve_engine.output_thread import OutputThread
from maskserve_engine.requests.manager import RequestManager
from maskserve_engine.requests.state import PrimingState, RequestState
from maskserve_engine.step_planner import Reading, StepPlan, StepPlanner, wants_of
from maskserve_engine.step_times import StepTimes, TakenStep

_log = logging.getLogger(__name__)
_LOST = (
    "the template's cached activations were lost while the edit ran, and a reproducible edit "
    "cannot go on without them; send it again"
)
_FAILED_STEPS = 3
"""Steps in a row in which every row failed, after which the engine gives itself up."""

Running = list[RequestState | PrimingState]


class _Reads(NamedTuple):
    """A row of this step and what it reads."""

    edit: RequestState
    reader: EntryReader
    handle: Handle


class StepRunner:
    """Takes steps; used by the engine thread only.

    What goes wrong with one row ends that row, and costs nobody else.
    """

    def __init__(
        self,
        config: Config,
        adapter: Adapter,
        manager: RequestManager,
        planner: StepPlanner,
        output: OutputThread,
        counters: dict[str, float],
        observations: Observations,
    ) -> None:
        self.adapter, self.manager, self.planner = adapter, manager, planner
        self.output, self.counters, self.observations = output, counters, observations
        self._fixed = config.cache.plan == "fixed" or config.cache.conv_halo > 0
        self._dense = ("dense",) * adapter.blocks
        self._turn = 0
        """Number of the step."""
        self._failed_steps = 0
        self.times = StepTimes(planner.costs, manager.cache.store.loader, counters, observations)
        self._counted = CountedWork()

    def step(self, running: Running) -> None:
        """Take one step of these rows.

        Raises:
            RuntimeError: nothing but failures for several steps.
        """
        self._turn += 1
        reading = self._turn_to(running)
        planned = self._plan(running, reading)
        reads = self._run(running, reading, planned)
        kinds = self._dense if planned is None else planned.plan.kinds
        for edit in list(running):
            try:
                self._update(edit, len(running), kinds, cached=edit.request_id in reads)
            except Exception as error:
                _log.exception("the end of a step failed", extra=about(edit.request_id))
                self._drop(edit, error)

    def _turn_to(self, running: Running) -> list[_Reads]:
        """Give each row what its step reads, as far as that can be read now."""
        readers = [(e, e.reader) for e in running if isinstance(e, RequestState) and e.reader]
        shared = _shared([(reader, e.row.step, e.mask_ratio) for e, reader in readers])
        reading = []
        for edit, reader in readers:
            step = edit.row.step
            whole = (reader.key, reader.anchors[step]) in shared
            handle = reader.turn_to(step, whole=whole)
            if handle is not None:
                reading.append(_Reads(edit, reader, handle))
        return reading

    def _plan(self, running: Running, reading: list[_Reads]) -> StepPlan | None:
        """Decide how the rows that read entries run, and ask for what they will read."""
        if not reading:
            return None
        work = self._work(running)
        reads = {each.edit.request_id for each in reading}
        dense = [edit.counted for edit in running if edit.request_id not in reads]
        planned = self.planner.plan(
            work,
            [
                Reading(each.edit.counted, each.handle.load, each.reader.stays(each.edit.row.step))
                for each in reading
            ],
            Totals.sum_of(dense) if dense else None,
            fixed=self._fixed or any(e.edit.job.request.settings.reproducible for e in reading),
        )
        wants, later = wants_of(planned.plan, work.maps), wants_of(planned.ahead, work.maps)
        for each in reading:
            each.handle.want(wants, self._turn)
        for each in reading:
            step = each.edit.row.step
            ahead = each.reader.look_ahead(step)
            if ahead is not None:
                handle, at = ahead
                handle.want(later, self._turn + at - step)
        self.counters[f"plans_total.{planned.choice}"] += 1
        return planned

    def _run(
        self, running: Running, reading: list[_Reads], planned: StepPlan | None
    ) -> dict[str, Handle]:
        """One model call for all rows; when it fails, one call each, so that one bad row or a
        batch too large for the memory costs nobody else. Returns what rows have read.
        """
        reads = {each.edit.request_id: each.handle for each in reading}
        if not running:
            return reads
        self.counters["step_tokens_total"] += sum(edit.step_tokens for edit in running)
        earlier = [len(each.handle.stalls) for each in reading]
        begin = mark(self.adapter.device)
        try:
            self._step_all(running, reading, reads, planned)
            whole, self._failed_steps = True, 0
        except Exception:
            _log.exception("a step of %d rows failed; trying its rows one by one", len(running))
            whole = False
        if not whole:  # outside of `except`, whose error keeps the tensors of the failed step
            self._run_alone(running, reads, planned)
        span = Span(begin, mark(self.adapter.device))
        stalls = [e.handle.stalls[n:] for e, n in zip(reading, earlier, strict=True)]
        self.times.add(
            TakenStep(
                span,
                tuple([stall for own in stalls for stall in own]),
                self._flops(running, reads, planned),
                None if planned is None else planned.plan.latency,
                len(running),
                tuple([edit.priming for edit in running if isinstance(edit, PrimingState)]),
            )
        )
        return reads

    def _step_all(
        self,
        running: Running,
        reading: list[_Reads],
        reads: dict[str, Handle],
        planned: StepPlan | None,
    ) -> None:
        """The step; again without the entries that turned out to be lost, as often as some do."""
        plan = None if planned is None else planned.plan
        while running:
            try:
                entries = [reads.get(edit.request_id) for edit in running]
                self.adapter.step([edit.row for edit in running], plan, entries)
                return
            except EntryLost as error:
                lost = [
                    each
                    for each in reading
                    if each.edit.request_id in reads and each.handle.load.lost
                ]
                if not lost:
                    raise
                _log.warning("a step goes on without an entry: %s", error)
            # outside of `except`, whose error keeps the tensors of the step that was given up
            for each in lost:
                del reads[each.edit.request_id]
                if each.edit.job.request.settings.reproducible:
                    running.remove(each.edit)
                    self.manager.end(each.edit.request_id, EngineFailed(_LOST))
                    continue
                each.reader.lose()

    def _run_alone(
        self, running: Running, reads: dict[str, Handle], planned: StepPlan | None
    ) -> None:
        plan = None if planned is None else planned.plan
        for edit in list(running):
            try:
                self.adapter.step([edit.row], plan, [reads.get(edit.request_id)])
            except Exception as error:
                _log.exception("the step of an edit failed", extra=about(edit.request_id))
                running.remove(edit)
                self._drop(edit, error)
        self._failed_steps = 0 if running else self._failed_steps + 1
        if self._failed_steps >= _FAILED_STEPS:
            raise RuntimeError(f"{_FAILED_STEPS} steps in a row failed for every row")

    def _flops(
        self, running: Running, reads: dict[str, Handle], planned: StepPlan | None
    ) -> float | None:
        """Counted work of the step just taken. None: its rows have done less, since they failed or
        left blocks out.
        """
        if not running or any(_skipped(edit) for edit in running):
            return None
        return self._counted.flops(
            self._work(running),
            [edit.counted for edit in running],
            [edit.request_id in reads for edit in running],
            () if planned is None else planned.plan.kinds,
        )

    def _drop(self, edit: RequestState | PrimingState, error: Exception) -> None:
        """End what cannot go on."""
        if isinstance(edit, PrimingState):
            self.manager.primings.end(edit, complete=False, unfit=True)
        else:
            reason = EngineFailed(f"a denoising step failed ({type(error).__name__})")
            self.manager.end(edit.request_id, reason)

    def _update(
        self,
        edit: RequestState | PrimingState,
        rows: int,
        kinds: tuple[str, ...],
        *,
        cached: bool,
    ) -> None:
        """Count, tell the client how far it is, and let a finished row leave."""
        if isinstance(edit, PrimingState):
            self.counters["priming_rows_total"] += 1
            self.manager.primings.keep_anchor(edit)
            return
        self.counters["skipped_rows_total"] += _skipped(edit)
        ran = edit.count_step(rows, kinds if cached else self._dense)
        self.counters["cached_rows_total" if cached else "dense_rows_total"] += 1
        for kind, blocks in Counter(ran).items() if cached else ():
            self.counters[f"plan_blocks_total.{kind}"] += blocks
        computed = edit.active_tokens if cached else edit.total_tokens
        edit.computed_tokens += computed
        self.counters["active_tokens_total"] += edit.passes * computed
        if edit.row.step == edit.steps:
            if edit.audit is None:
                self.counters["edits_total"] += 1
                self.observations.add("mask_ratio", edit.mask_ratio)
                self.observations.add("queue_seconds", edit.admitted - edit.submitted)
            self.manager.finish(edit)
        else:
            self._tell_progress(edit)

    def _tell_progress(self, edit: RequestState) -> None:
        settings, step = edit.job.request.settings, edit.row.step
        if settings.preview_every and step % settings.preview_every == 0:
            steps, latents = edit.steps, edit.row.estimate()
            self.output.send_made(edit.sink, lambda: Preview(step, steps, latents.array()))
        elif settings.progress:
            self.output.send(edit.sink, Progress(step, edit.steps))

    def _work(self, running: Running) -> ModelWork:
        """Of the first row's size: rows of a batch are as large, or their blocks cost alike."""
        first = running[0]
        job = first.priming.job if isinstance(first, PrimingState) else first.job
        _, height, width = job.moments.shape
        return self.adapter.work(height, width)


def _skipped(edit: RequestState | PrimingState) -> bool:
    """Whether the step just taken left blocks of this row out."""
    return isinstance(edit, RequestState) and edit.row.skipped > edit.skipped


def _shared(rows: list[tuple[EntryReader, int, float]]) -> set[tuple[str, Anchor | None]]:
    """Entries that are better brought in whole, once: rows read more of them than there is.

    Args:
        rows: reader, step and mask ratio of each.
    """
    share: dict[tuple[str, Anchor | None], float] = {}
    seen: set[tuple[str, Anchor | None, bytes]] = set()
    for reader, step, mask_ratio in rows:
        name = (reader.key, reader.anchors[step])
        if (*name, reader.selection.digest) not in seen:
            seen.add((*name, reader.selection.digest))
            share[name] = share.get(name, 0.0) + 1.0 - mask_ratio
    return {name for name, total in share.items() if total > 1.0}
