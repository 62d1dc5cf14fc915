"""The rows of admitted edits, made as their execution plans say.

Used by the engine thread only.
"""

from __future__ import annotations

import time
from dataclasses import replace

from maskserve_common.contracts.reuse_levels import ReuseLevel
from maskserve_engine.batch.step_cache import RefreshSchedule
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.requests.admission import ExecutionPolicy
from maskserve_engine.requests.due_times import DueTimes
from maskserve_engine.requests.edit_adapters import EditAdapters, LateRows
from maskserve_engine.requests.execution_plan import DENSE
from maskserve_engine.requests.executor import (
    CachedRowSpec,
    Executor,
    PlainRowSpec,
    RowReport,
)
from maskserve_engine.requests.refresh_schedules import (
    RefreshSchedules,
    step_cache_bytes,
    step_cache_bytes_with_template,
)
from maskserve_engine.requests.state import ReadSchedule, RequestState, RequestTable


class EditRows:
    """Makes and releases rows of edits.

    Args:
        adapter: the model.
        executor: holds the rows.
        table: table of the edits.
        adapters: the edits' LoRAs.
        late_rows: rows whose LoRAs come later.
        due_times: chooses the reuse levels of edits that would be late.
        schedules: decides refresh steps.
        policy: chooses the plans of edits; None: all run dense.
    """

    def __init__(
        self,
        adapter: Adapter,
        executor: Executor,
        table: RequestTable,
        adapters: EditAdapters,
        late_rows: LateRows,
        due_times: DueTimes,
        schedules: RefreshSchedules,
        policy: ExecutionPolicy | None,
    ) -> None:
        self._adapter, self._executor, self._table = adapter, executor, table
        self._adapters, self._late_rows = adapters, late_rows
        self._due_times, self._schedules, self._policy = due_times, schedules, policy

    def make(self, edit: RequestState) -> RowReport:
        """Make the row of an edit that was admitted; raises whatever went wrong."""
        is_late = bool(self._adapters.absent_loras(edit))
        if edit.levels and not is_late:  # its steps without LoRAs are counted
            level = self._due_times.level(edit, self._batch_mates(edit), time.monotonic())
            if level is not None:
                self._step_down(edit, level)
        report = self._make_planned(edit)
        if is_late:
            self._late_rows.add(edit)
        elif edit.loras.effective:
            self._adapters.attach(edit.request_id, edit.loras.effective)
        return report

    def _step_down(self, edit: RequestState, level: ReuseLevel) -> None:
        edit.step_down(level, self._schedules.at_level(edit, level), self._adapter)
        if edit.plan.outcome == "hit":
            assert self._policy is not None, "it chose to read the template"
            edit.set_plan(self._policy.at_level(edit, level), self._adapter)

    def _make_planned(self, edit: RequestState) -> RowReport:
        """Make the row without its LoRAs."""
        plan = edit.plan
        if plan.mode != "cached":
            return self._executor.make(edit.request_id, PlainRowSpec(edit.job, plan.key))
        if plan.schedule is not None:
            return self._make_with_refresh_steps(edit, plan.schedule)
        return self._make_with_template(edit, plan.schedule_with_template)

    def _make_with_template(
        self, edit: RequestState, schedule: RefreshSchedule | None
    ) -> RowReport:
        """Make a row that reads its template; if there is no room for its step cache, it has
        none.
        """
        plan, job = edit.plan, edit.job
        nbytes = 0
        if schedule is not None:
            nbytes = step_cache_bytes_with_template(schedule, self._adapter, job)
        spec = CachedRowSpec(
            job=job,
            noise_seed=job.request.template_noise_seed,
            key=plan.key,
            anchors=plan.anchors,
            force=job.request.settings.insists,
            schedule=schedule,
            nbytes=nbytes,
        )
        report = self._executor.make(edit.request_id, spec)
        edit.reads = ReadSchedule.of_template(plan.key, plan.anchors, report)
        if report.schedule is not None:
            edit.step_cache_bytes = nbytes
        elif schedule is not None:
            edit.set_plan(replace(plan, schedule_with_template=None), self._adapter)
        return report

    def _make_with_refresh_steps(self, edit: RequestState, schedule: RefreshSchedule) -> RowReport:
        """Make a row with refresh steps; if there is no room for its step cache, make it dense."""
        nbytes = step_cache_bytes(schedule, self._adapter, edit.job)
        spec = PlainRowSpec(edit.job, edit.plan.key, schedule, nbytes)
        report = self._executor.make(edit.request_id, spec)
        if report.complete:
            sigmas = self._adapter.sigmas(edit.job)
            edit.reads = ReadSchedule.of_schedule(edit.request_id, schedule, sigmas)
            edit.step_cache_bytes = nbytes
        else:
            edit.plan = replace(DENSE, outcome="miss", key=edit.plan.key, dense_for="memory")
        return report

    def _batch_mates(self, edit: RequestState) -> list[RequestState]:
        return [
            running_edit
            for running_edit in self._table.edits.values()
            if running_edit.running and running_edit is not edit
        ]

    def release(self, edit: RequestState) -> None:
        """Release an edit's row, if it has one, and keep its loads."""
        loads = self._executor.release(edit.request_id)
        if loads is not None:
            edit.loads = loads
