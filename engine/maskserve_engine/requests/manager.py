"""The manager: accepts edits, passes each through the admission checks, and makes sure that each
gets one final answer.

Plain bookkeeping between the scheduler, the cache and the rows; used by the engine thread only.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import replace

from maskserve_common.config import Config, model_name
from maskserve_common.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    MaskserveError,
    guarded,
)
from maskserve_common.observations import Observations
from maskserve_common.resources.loading import Kind, Loadable, Loaded
from maskserve_common.resources.resource_states import Resource
from maskserve_common.status import RowStatus
from maskserve_engine.base.job import EditJob, Failed, FinalEvent
from maskserve_engine.base.mailbox import OutputThread
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.requests.admission import TEMPLATE, AdmissionChecks, ExecutionPolicy
from maskserve_engine.requests.audits import Audits
from maskserve_engine.requests.due_times import DueTimes
from maskserve_engine.requests.edit_adapters import EditAdapters, LateRows
from maskserve_engine.requests.edit_report import final_meta, timeline
from maskserve_engine.requests.edit_rows import EditRows
from maskserve_engine.requests.execution_plan import DENSE
from maskserve_engine.requests.executor import Executor, RowStep
from maskserve_engine.requests.primings import Primings
from maskserve_engine.requests.refresh_schedules import RefreshSchedules
from maskserve_engine.requests.regions import EditRegions
from maskserve_engine.requests.state import Priming, RequestState, RequestTable
from maskserve_engine.scheduling.step_scheduler import Run, Ticket

_ONLY_CACHED = "without a cache there are no primings and no entries"


def overflowed(step: int) -> EngineFailed:
    """Return the error of an edit whose latents are not finite after a step."""
    return EngineFailed(
        f"the edit's numbers overflowed: after step {step} its latents are not all finite (a LoRA "
        "or ControlNet of too large a scale, or weights that float16 does not hold: [model] dtype)"
    )


class RequestManager:
    """Holds every accepted edit and every template being primed, from acceptance to its end.

    `adapters` are the edits' LoRAs and ControlNets, `due_times` refuses edits that would be late,
    `primings` is None where all edits run dense, and `observations` get the edits' refresh errors.
    """

    def __init__(
        self,
        config: Config,
        adapter: Adapter,
        executor: Executor,
        output: OutputThread,
        table: RequestTable,
        adapters: EditAdapters,
        audits: Audits,
        due_times: DueTimes,
        primings: Primings | None,
        observations: Observations,
    ) -> None:
        self.adapter, self.executor, self.output = adapter, executor, output
        self.adapters, self.audits, self.due_times = adapters, audits, due_times
        self.primings, self._observations = primings, observations
        self._worker, self._model = config.worker, model_name(config)
        self.schedules = RefreshSchedules(config, adapter)
        self._table = table
        self.edits, self.scheduler = table.edits, table.scheduler
        self.resource_states = table.resource_states
        self._priming = {} if primings is None else primings.active
        self.policy: ExecutionPolicy | None = None
        """Chooses the plans of edits; None: all edits run dense."""
        if primings is not None:
            self.policy = ExecutionPolicy(
                primings, audits, due_times, table, self.schedules, adapter
            )
        policy = self.policy
        choose = None if policy is None else policy.choose_with_adapters
        self.late_rows = LateRows(adapters, choose, executor, adapter)
        self._rows = EditRows(
            adapter, executor, table, adapters, self.late_rows, due_times, self.schedules, policy
        )
        self.regions = EditRegions(
            self.schedules, config.cache.dense_above_ratio, adapter, executor, adapters
        )
        self._checks = AdmissionChecks(
            adapter, table, adapters, config.engine.max_rows, due_times, primings, policy
        )
        self.refusal: MaskserveError | None = None
        """Reason why no edit is accepted any more; None: edits are."""
        self.next_decision = math.inf
        """time.monotonic() at which `schedule` has something to decide even if nothing happens
        until then.
        """
        self._listed: list[RequestState | Priming | None] = []
        """All edits and primings, then None and the running ones, when `_waiting` was made."""
        self._waiting: tuple[RowStatus, ...] = ()

    def accept(self, edit: RequestState) -> None:
        try:
            if self.refusal is not None:
                raise self.refusal
            self._queue_or_wait(edit)
        except Exception as error:
            if self.edits.get(edit.request_id) is None:  # no other edit has this id
                self._release_adapters(edit.request_id)
            self.output.send(edit.sink, Failed(guarded(edit.request_id, error)))

    def holds(self, edit: RequestState | Priming) -> bool:
        registry = self.edits if isinstance(edit, RequestState) else self._priming
        return registry.get(edit.request_id) is edit

    def schedule(self) -> tuple[Run, ...]:
        """Decide the next step: answer expired edits, and make rows for admitted ones."""
        now_s = time.monotonic()
        self.audits.judge_arrived()
        expired = [r for r, e in self.edits.items() if e.waiting and e.has_expired(now_s)]
        for request_id in expired:
            self.end(request_id, DeadlineExceeded("its deadline passed while the edit waited"))
        for edit in self.late_rows.overdue():
            self._park(edit)
        if not len(self.scheduler) and self.refusal is None:
            self._audit()
        decision = self.scheduler.schedule(now_s, self.executor.devices)
        for ticket in decision.expired:
            self.end(
                ticket.request_id, DeadlineExceeded("its deadline passed before the edit was done")
            )
        for ticket in decision.admitted:
            self._admit(ticket)
        self.next_decision = decision.next_decision
        return decision.runs

    def running(self, run: Run) -> list[RequestState | Priming]:
        """Return the edits and primings of a run that have a row now."""
        requests: list[RequestState | Priming | None] = [
            self.edits.get(t.request_id) or self._priming.get(t.request_id) for t in run.rows
        ]
        return [edit for edit in requests if edit is not None and edit.running]

    def cancel(self, request_id: str) -> None:
        self.end(request_id, Cancelled("the edit was cancelled"))

    def prime(self, job: EditJob) -> str:
        """Prime a template that no edit uses yet; return `primed`, `priming` or `absent`.

        Raises:
            MaskserveError: no more requests are accepted (`refusal`).
        """
        if self.refusal is not None:
            raise self.refusal
        if self.primings is None:
            return "absent"
        if self.primings.cache.priming_state(job) == "absent":
            self.primings.begin(job, urgent=False)
        return self.primings.cache.priming_state(job)

    def follow_errors(self, edit: RequestState, step: RowStep) -> None:
        """Place the next refresh step of a running edit, and correct its prices, if the step has
        shown an error that it depends on.
        """
        schedule = self.schedules.follow(edit, step)
        if schedule is not None:
            self.executor.refresh_at(edit.request_id, schedule)
            self._table.reprice(edit)

    def finish(self, edit: RequestState) -> None:
        """Answer an edit whose row has taken its last step."""
        latents = self.executor.result(edit.request_id)
        self._rows.release(edit)
        self._remove(edit)
        if edit.audit is not None:
            self.audits.compare(edit.audit, latents)
            return

        def final() -> FinalEvent | Failed:
            array = latents.array()  # waits for its steps
            if not latents.finite():
                return Failed(overflowed(edit.work.steps), timeline(edit))
            if edit.refresh_error is not None:
                self._observations.add("refresh_error", edit.refresh_error, self._model)
            return FinalEvent(array, final_meta(edit, self._worker, self._model), timeline(edit))

        def lost() -> Failed:
            return Failed(
                EngineFailed("the result could not be copied from the device"), timeline(edit)
            )

        self.output.send_when_ready(edit.sink, final, lost)
        # Steps without LoRAs are not the template's fault.
        if edit.plan.outcome == "hit" and edit.loras.always:
            self.audits.offer(edit.plan.key, edit.job, latents)

    def _remove(self, edit: RequestState) -> None:
        self.scheduler.finish(edit.request_id)
        self.edits.pop(edit.request_id)
        self._release_adapters(edit.request_id)

    def _release_adapters(self, request_id: str) -> None:
        """Release the LoRAs and ControlNets of an edit that has ended."""
        self.late_rows.leave(request_id)
        self.adapters.let_go(request_id)

    def end(self, request_id: str, error: MaskserveError) -> None:
        """Answer an edit that cannot finish; release its row and entries."""
        edit = self.edits.pop(request_id, None)
        if edit is not None:
            self._rows.release(edit)
            self.resource_states.leave(request_id)
            self._release_adapters(request_id)
            self.scheduler.cancel(request_id)
            self.output.send(edit.sink, Failed(error, timeline(edit)))

    def fail(self, request: RequestState | Priming, error: MaskserveError) -> None:
        """End an edit or a priming whose row cannot go on."""
        if isinstance(request, RequestState):
            self.end(request.request_id, error)
        else:
            assert self.primings is not None, _ONLY_CACHED
            self.primings.end(request, complete=False, unfit=True)

    def keep_entry(self, priming: Priming, step: RowStep) -> None:
        """Store the entry that a priming row's step recorded."""
        assert self.primings is not None, _ONLY_CACHED
        self.primings.keep_entry(priming, step)

    def end_all(self, error: MaskserveError) -> None:
        """End all edits with an error, and refuse later ones."""
        self.refusal = error
        for request_id in list(self.edits):
            self.end(request_id, error)
        if self.primings is not None:
            self.primings.end_all()

    def entries_arrived(self, key: str) -> None:
        """Handle entries that file tiers have read or written. Edits that wait for a template keep
        waiting while more of it is being loaded.
        """
        assert self.primings is not None, _ONLY_CACHED
        if not self.primings.cache.is_loading(key):
            self.template_settled(key)

    def template_settled(self, key: str) -> None:
        """Pass a template's edits through the admission checks again: it can be read now, or will
        not be.
        """
        for request_id in self.resource_states.record_arrival(Resource(TEMPLATE, key)):
            self._resume(self.edits.pop(request_id))

    def adapter_loaded(self, kind: Kind, item: Loadable, outcome: Loaded | MaskserveError) -> None:
        """Resume the edits that waited for a LoRA or ControlNet, or answer them if its load has
        failed.
        """
        late = self.late_rows.waiting_for(item)
        if isinstance(outcome, MaskserveError):
            failed = self.adapters.record_failure(kind, item, outcome)
            for request_id in {edit.request_id for edit in late}.union(failed):
                self.end(request_id, outcome)
            return
        ready = self.adapters.record_arrival(kind, item, outcome)
        for edit in late:
            try:
                if not self.adapters.absent_loras(edit):
                    self.late_rows.attach(edit)
            except Exception as error:
                self.end(edit.request_id, guarded(edit.request_id, error))
        for request_id in ready:
            edit = self.edits[request_id]
            self._end_wait(edit)
            if edit.running:
                self._unpark(edit)
            else:
                self._resume(self.edits.pop(request_id))

    def rows(self) -> tuple[tuple[RowStatus, ...], tuple[RowStatus, ...]]:
        """Return the status of running and of waiting edits; the latter is the same object while
        the same edits wait.
        """
        requests: dict[str, RequestState | Priming] = {**self.edits, **self._priming}
        running = [
            requests[t.request_id] for t in self.scheduler.running if t.request_id in requests
        ]
        listed = [*requests.values(), None, *running]
        if listed != self._listed:
            self._listed = listed
            names = {edit.request_id for edit in running}
            self._waiting = tuple(e.status() for name, e in requests.items() if name not in names)
        return tuple([edit.status() for edit in running]), self._waiting

    def _queue_or_wait(self, edit: RequestState) -> None:
        """Queue an edit, or let it wait for the resources that an admission check names.

        Raises:
            MaskserveError: it is refused.
        """
        missing = self._checks.missing(edit)
        if missing:
            self._table.wait(edit, missing)
        else:
            self._table.queue(edit)

    def _end_wait(self, edit: RequestState) -> None:
        edit.waiting = False
        if edit.plan.mode != "wait":
            self.adapters.record_wait(edit, time.monotonic() - edit.waiting_since)

    def _park(self, edit: RequestState) -> None:
        """Take a row out of the batch whose next step needs LoRAs that are not loaded."""
        self.late_rows.leave(edit.request_id)
        self.scheduler.cancel(edit.request_id)
        try:
            absent = self.adapters.absent_loras(edit)
            if absent:
                self._table.wait(edit, absent)
            else:
                self._unpark(edit)
        except MaskserveError as error:
            self.end(edit.request_id, error)

    def _unpark(self, edit: RequestState) -> None:
        """Return a parked row to the scheduler, as the oldest, once its LoRAs are loaded."""
        self.late_rows.attach(edit)
        try:
            self.scheduler.submit(edit.make_ticket())
        except MaskserveError as error:
            self.end(edit.request_id, error)

    def _audit(self) -> None:
        """Repeat a cached edit for an audit; called when there is nothing else to do."""
        audit = self.audits.next()
        if audit is None:
            return
        edit = RequestState.of(audit.dense_job(), lambda event: None, self.adapter)
        edit.audit = audit
        with suppress(MaskserveError):  # a LoRA is gone, or no more edits may wait
            if self.adapters.absent_nets(edit) or self.adapters.absent_loras(edit):
                self._release_adapters(edit.request_id)
            else:
                self._table.queue(edit)

    def _resume(self, edit: RequestState) -> None:
        """Pass an edit that has waited through the admission checks again. If its template could
        not be read from files, prime it.
        """
        tier, edit.waiting = edit.plan.tier, False
        try:
            self._queue_or_wait(edit)
        except Exception as error:
            self._release_adapters(edit.request_id)
            failed = Failed(guarded(edit.request_id, error), timeline(edit))
            self.output.send(edit.sink, failed)
        if tier and edit.plan.mode == "cached":
            edit.plan = replace(edit.plan, tier=tier)  # the tier where it lay before the load

    def _admit(self, ticket: Ticket) -> None:
        """Make an admitted edit's row; on an error answer that edit alone."""
        edit = self.edits.get(ticket.request_id)
        if edit is None:
            assert self.primings is not None, _ONLY_CACHED
            self.primings.admit(ticket.request_id)
            return
        if edit.running:
            return  # its row was parked
        try:
            edit.times.admitted = time.monotonic()
            steps, report = edit.work.steps, self._rows.make(edit)
            edit.running = True
            if edit.level is not None:
                self._table.reprice(edit, fewer=steps - edit.work.steps)
            if edit.job.request.settings.insists and not report.complete:
                self._readmit(edit)
            elif self.primings is not None:
                self.primings.cache.count(edit.plan)
        except Exception as error:
            self.end(ticket.request_id, guarded(ticket.request_id, error))

    def _readmit(self, edit: RequestState) -> None:
        """Return an edit to the admission checks: its template was evicted while it queued, and it
        may not run without.
        """
        self._rows.release(edit)
        edit.running, edit.reads, edit.loads = False, None, None
        edit.times.queued = edit.times.admitted = 0.0
        edit.plan = DENSE
        self.scheduler.cancel(edit.request_id)
        del self.edits[edit.request_id]
        self._resume(edit)
