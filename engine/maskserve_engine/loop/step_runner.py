"""One step of the batch: load entries, plan, run, and remove finished rows."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count

from maskserve_common.config import Config
from maskserve_common.contracts.keys import Anchor
from maskserve_common.contracts.request import predicted_steps
from maskserve_common.errors import EngineFailed
from maskserve_common.logs import about
from maskserve_common.observations import Observations
from maskserve_engine.base.device_clock import Span
from maskserve_engine.base.job import PreviewEvent, ProgressEvent
from maskserve_engine.base.mailbox import OutputThread
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.loop.measured_costs import QueuedStep, StepTimes
from maskserve_engine.loop.step_planner import PlannedRow, StepPlan, StepPlanner
from maskserve_engine.planning.flops import BatchFlops, ModelWork, Totals
from maskserve_engine.requests.executor import (
    Executor,
    LoadState,
    Read,
    RowStep,
    StepInput,
    StepResult,
)
from maskserve_engine.requests.manager import RequestManager, overflowed
from maskserve_engine.requests.state import Priming, ReadSchedule, RequestState
from maskserve_engine.scheduling.policies import policy_of

_log = logging.getLogger(__name__)

Request = RequestState | Priming


class StepRows:
    """The rows of a step: those of edits, or that of a priming, whose entries must not depend on
    other rows.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.edits = [request for request in requests if isinstance(request, RequestState)]
        self.primings = [request for request in requests if isinstance(request, Priming)]


class StepRunner:
    """Takes steps and records their results; used by the engine thread only.

    An error of one row ends that row alone.

    Args:
        adapter: adapter of the model, used only to count its work.
        planner: planner of rows that read entries.
        overhead_shares: returns the seconds that a step of these edits takes on a number of ranks,
            beyond an even share of its work.
    """

    def __init__(
        self,
        config: Config,
        adapter: Adapter,
        executor: Executor,
        manager: RequestManager,
        planner: StepPlanner,
        output: OutputThread,
        times: StepTimes,
        counters: dict[str, float],
        observations: Observations,
        overhead_shares: Callable[[Sequence[RequestState], int], float],
    ) -> None:
        self._overhead_shares = overhead_shares
        self.adapter, self.executor, self.manager = adapter, executor, manager
        self.planner, self.output, self.times = planner, output, times
        self.counters, self.observations = counters, observations
        self._deals_passes = policy_of(config.engine).deals
        """Whether all devices take every step together, as one faster device would."""
        # Such entries have keys and values of some tokens, but no hidden states.
        keys_only = config.cache.conv_halo > 0 or adapter.spec.encoder_picture is not None
        self._fixed = config.cache.plan == "fixed" or keys_only
        self._dense = ("dense",) * adapter.blocks
        self._numbers = count(1)
        self._batch_flops = BatchFlops()

    def step(self, running: Sequence[Request], devices: tuple[int, ...] = (0,)) -> None:
        """Queue one step of these rows. It returns when the device has done the steps before it, or
        all but the last of them (`StepTimes.keep_pace`): whoever comes or leaves meanwhile counts
        at the next one.

        Args:
            running: at least one row.
            devices: devices that compute them.

        Raises:
            RuntimeError: all rows have failed for several steps.
        """
        rows = StepRows(_without_delayed(running))
        reads, loads = self._load(rows.edits, devices)
        # Rows of a batch have the same size, or their blocks the same costs.
        _, height, width = rows.requests[0].job.moments.shape
        work = self.adapter.work(height, width)
        planned = self._plan(rows, len(devices), work, reads, loads)
        step = self._input(rows, devices, work, reads, planned)
        self.counters["step_tokens_total"] += sum(row.step_tokens for row in rows.requests)

        def record(result: StepResult) -> None:
            # Edits that were cancelled during the step are already answered.
            remaining = StepRows([row for row in rows.requests if self.manager.holds(row)])
            if result.control_waits:
                self._record_waits(remaining.edits, result.control_waits)
            self._record_time(remaining, len(rows.requests), work, result, planned)
            self._update(remaining, result, self._dense if planned is None else planned.plan.kinds)

        self.executor.step(step, record)
        self.times.keep_pace()

    def _load(
        self, edits: Sequence[RequestState], devices: tuple[int, ...]
    ) -> tuple[list[Read], Mapping[str, tuple[LoadState, ...]]]:
        """Start the loads of the entries that cached rows read in this step, if they are ready."""
        readers = [(edit, edit.reads) for edit in edits if edit.reads is not None]
        if not readers:
            return [], {}
        readers = [(e, reads) for e, reads in readers if not reads.is_dense(e.tally.done)]
        whole_entries = set[tuple[str, Anchor | None]]()
        if len(readers) > 1:
            whole_entries = _entries_loaded_whole(
                [(reads, e.tally.done, e.work.mask_ratio) for e, reads in readers]
            )
        row_reads = [
            Read(
                edit.request_id,
                (reads.key, reads.anchors[edit.tally.done]) in whole_entries,
                edit.job.request.settings.reproducible,
                text=not reads.leaves_out_text(edit.tally.done),
            )
            for edit, reads in readers
        ]
        loads = self.executor.load(row_reads, devices)
        return [read for read in row_reads if read.row in loads], loads

    def _plan(
        self,
        rows: StepRows,
        devices: int,
        work: ModelWork,
        reads: list[Read],
        loads: Mapping[str, tuple[LoadState, ...]],
    ) -> StepPlan | None:
        """Plan how rows that read entries run on `devices` devices; None: no row reads any."""
        if not reads:
            return None
        planned_rows, dense_totals, fixed = [], [row.totals for row in rows.primings], self._fixed
        ranks = devices if devices > 1 and self._share_tokens(rows.edits) else 1
        row_reads = {read.row: read for read in reads}
        for edit in rows.edits:
            read = row_reads.get(edit.request_id)
            if read is None or edit.reads is None:
                dense_totals.append(edit.totals)
                continue
            row_loads, stays = loads[read.row], edit.reads.stays(edit.tally.done)
            planned_rows.append(PlannedRow(edit.work.reading(text=read.text), row_loads, stays))
            if edit.reads.looks_ahead(edit.tally.done):
                lookahead = edit.work.lookahead
                if lookahead.reads:
                    planned_rows.append(PlannedRow(lookahead.totals, row_loads, stays))
                else:
                    dense_totals.append(lookahead.totals)
            # Text and step caches have keys and values only. Whether a row reads them follows from
            # its own step, so that its picture does not depend on its batch.
            only_keys = edit.reads.reads_step_cache or not read.text
            fixed = fixed or read.required or only_keys
        dense = Totals.sum_of(dense_totals) if dense_totals else None
        planned = self.planner.plan(work, planned_rows, dense, fixed=fixed, ranks=ranks)
        self.counters[f"plans_total.{planned.choice}"] += 1
        return planned

    def _input(
        self,
        rows: StepRows,
        devices: tuple[int, ...],
        work: ModelWork,
        reads: list[Read],
        planned: StepPlan | None,
    ) -> StepInput:
        row_ids = tuple([row.request_id for row in rows.requests])
        number = next(self._numbers)
        measures = self.manager.regions.measures
        region_edits = [edit for edit in rows.edits if edit.plan.region is not None]
        measured_rows = tuple([edit.request_id for edit in region_edits if measures(edit)])
        if planned is None:
            return StepInput(number, row_ids, devices, measured=measured_rows)
        return StepInput(
            number=number,
            rows=row_ids,
            devices=devices,
            reads=tuple(reads),
            maps=work.maps,
            plan=planned.plan,
            next_plan=planned.next_plan,
            measured=measured_rows,
        )

    def _record_waits(self, edits: Sequence[RequestState], waits: tuple[float, ...]) -> None:
        for seconds in waits:
            self.observations.add("controlnet_stall_seconds", seconds)
        for edit in edits:
            if edit.controls.effective:
                edit.controls.stalled_s += sum(waits)

    def _record_time(
        self,
        rows: StepRows,
        count: int,
        work: ModelWork,
        result: StepResult,
        planned: StepPlan | None,
    ) -> None:
        """Record the time of a step.

        Args:
            rows: rows of the step that still run.
            count: number of all its rows.
            work: work of the model at the rows' size.
            result: result of the step.
            planned: plan of the step; None: no row read an entry.
        """
        ranks, edits = 1 if self._deals_passes else result.ranks, rows.edits
        # If ranks dealt the passes, FLOPs per rank are not known.
        counted = len(rows.requests) == count and (ranks == 1 or self._share_tokens(edits))
        flops = self._flops(rows.requests, work, result, planned) if counted else None
        overhead_s = self._overhead_shares(edits, ranks) if ranks > 1 and edits else 0.0
        self.times.add(
            QueuedStep(
                span=result.span,
                stalls=result.stalls,
                flops=None if flops is None else flops / ranks,
                predicted=None if planned is None else planned.plan.latency + overhead_s,
                rows=len(result.rows),
                primings=tuple(
                    [row for row in rows.primings if row.request_id not in result.failed]
                ),
                host=self._host_seconds(work, planned) if rows.requests else 0.0,
                overhead_s=overhead_s,
            )
        )

    def _share_tokens(self, edits: Sequence[RequestState]) -> bool:
        """Whether devices share the step's tokens; otherwise they deal the rows' passes."""
        return not self._deals_passes and all(edit.work.passes == 1 for edit in edits)

    def _flops(
        self,
        requests: Sequence[Request],
        work: ModelWork,
        result: StepResult,
        planned: StepPlan | None,
    ) -> float | None:
        """Return the counted FLOPs of the step just taken; None: some of its rows failed, or
        computed their references, too.
        """
        surviving = [row for row in requests if row.request_id not in result.failed]
        rows = list(zip(surviving, result.rows, strict=True))
        totals = [row.totals_of(step) for row, step in rows]
        counted = [one for one in totals if one is not None]
        if not counted or len(counted) < len(totals):
            return None
        edits = [(edit, step) for edit, step in rows if isinstance(edit, RequestState)]
        lookaheads = [edit.work.lookahead for edit, step in edits if step.looked_ahead]
        return self._batch_flops.of(
            work,
            [*counted, *(lookahead.totals for lookahead in lookaheads)],
            [*(step.read for step in result.rows), *(lookahead.reads for lookahead in lookaheads)],
            () if planned is None else planned.plan.kinds,
        ) + sum(edit.control_flops(step) for edit, step in edits)

    def _update(self, rows: StepRows, result: StepResult, kinds: tuple[str, ...]) -> None:
        """Count the step of each row, and end the rows that have failed; an error of one row does
        not affect others.
        """
        steps = {step.row: step for step in result.rows}
        for row in rows.requests:
            error = result.failed.get(row.request_id)
            if error is not None:
                self.manager.fail(row, error)
                continue
            try:
                step = steps[row.request_id]
                if isinstance(row, Priming):
                    self.counters["priming_rows_total"] += 1
                    self.manager.keep_entry(row, step)
                    continue
                if row.request_id in result.lost:
                    assert row.reads is not None, "only a row that reads entries can lose one"
                    row.reads.drop_entry(row.tally.done)
                self._count(row, step, len(steps), kinds, result.span)
            except Exception as error:
                _log.exception("the end of a step failed", extra=about(row.request_id))
                reason = EngineFailed(f"a denoising step failed ({type(error).__name__})")
                self.manager.fail(row, reason)

    def _count(
        self, edit: RequestState, step: RowStep, rows: int, kinds: tuple[str, ...], span: Span
    ) -> None:
        """Count an edit's step; report progress to the client, or finish the row."""
        work, cached = edit.work, step.read
        if step.stale:
            edit.controls.stale_steps += 1
            self.counters["controlnet_stale_steps_total"] += 1
        edit.times.first_step = edit.times.first_step or time.monotonic()
        ran = edit.tally.add(step, rows, kinds if cached else self._dense)
        self.counters["cached_rows_total" if cached else "dense_rows_total"] += 1
        for kind, blocks in Counter(ran).items() if cached else ():
            self.counters[f"plan_blocks_total.{kind}"] += blocks
        computed = edit.computed_tokens(step)
        edit.tally.computed_tokens += computed
        if edit.plan.schedule is not None:
            self.manager.follow_errors(edit, step)
        if step.change is not None:
            self.manager.regions.follow(edit, step)
        self.counters["active_tokens_total"] += work.passes * computed
        if edit.overflowed is not None:
            self.manager.end(edit.request_id, overflowed(edit.overflowed))
        elif step.done == work.steps:
            if edit.audit is None:
                self.counters["edits_total"] += 1
                self.counters["skipped_rows_total"] += predicted_steps(edit.job.request.settings)
                self.observations.add("mask_ratio", work.mask_ratio)
                queued = edit.times.admitted - edit.times.submitted
                self.observations.add("queue_seconds", queued)
            self.manager.finish(edit)
        else:
            self._report_progress(edit, span)

    def _report_progress(self, edit: RequestState, span: Span) -> None:
        """Send the progress of an edit when the device has done the step."""
        settings, step, steps = edit.job.request.settings, edit.tally.done, edit.work.steps
        if settings.preview_every and step % settings.preview_every == 0:
            latents = self.executor.estimate(edit.request_id)

            def preview() -> PreviewEvent | ProgressEvent:
                if latents.finite():
                    return PreviewEvent(step, steps, latents.array())
                edit.overflowed = edit.overflowed or step  # the first step with infinite numbers
                return ProgressEvent(step, steps)

            self.output.send_when_ready(edit.sink, preview)
        elif settings.progress:

            def progress() -> ProgressEvent:
                span.wait()
                return ProgressEvent(step, steps)

            self.output.send_when_ready(edit.sink, progress)

    def _host_seconds(self, work: ModelWork, planned: StepPlan | None) -> float:
        launch = self.planner.costs.model.launch
        if planned is not None or not launch:
            return 0.0 if planned is None else planned.plan.host
        return launch * work.batch_launches(("dense",) * len(work.blocks))


def _without_delayed(running: Sequence[Request]) -> Sequence[Request]:
    """Return the rows that take this step. Some rows whose refresh step is due wait, so that the
    refresh steps of all rows spread evenly over steps; those that have waited longest go first.
    Waiting changes no picture, since no picture depends on its batch.
    """
    edits = [edit for edit in running if isinstance(edit, RequestState)]
    refreshing = [
        (edit, edit.reads)
        for edit in edits
        if edit.reads is not None and edit.reads.reads_step_cache
    ]
    room = max(1, round(sum(edit.plan.dense_steps / edit.work.steps for edit, _ in refreshing)))
    due_edits = [(edit, reads) for edit, reads in refreshing if reads.refreshes_at(edit.tally.done)]
    due_edits.sort(key=lambda due: -due[1].steps_delayed)
    for number, (_, reads) in enumerate(due_edits):
        reads.steps_delayed = 0 if number < room else reads.steps_delayed + 1
    delayed = [edit for edit, reads in due_edits if reads.steps_delayed]
    return [edit for edit in running if edit not in delayed] if delayed else running


def _entries_loaded_whole(
    rows: list[tuple[ReadSchedule, int, float]],
) -> set[tuple[str, Anchor | None]]:
    """Return the entries that are cheaper to load whole, because rows together read more tokens of
    them than they have. `rows` has each row's reads, its step and its mask ratio.
    """
    share: dict[tuple[str, Anchor | None], float] = {}
    counted_reads: set[tuple[str, Anchor | None, bytes]] = set()
    for reads, step, mask_ratio in rows:
        name = (reads.key, reads.anchors[step])
        if (*name, reads.selection) not in counted_reads:
            counted_reads.add((*name, reads.selection))
            share[name] = share.get(name, 0.0) + 1.0 - mask_ratio
    return {name for name, total in share.items() if total > 1.0}
