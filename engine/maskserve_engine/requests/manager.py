"""The manager: takes edits in, decides how each runs, and sees that each gets one final answer.

Plain bookkeeping between the scheduler, the cache and the rows; used by the engine thread only.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace

from maskserve_core.config import Config, model_name
from maskserve_core.contracts.scopes import name_of
from maskserve_core.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    MaskserveError,
    Overloaded,
    guarded,
)
from maskserve_core.worker.status import RowStatus
from maskserve_core.worker.step_scheduler import StepScheduler
from maskserve_core.worker.ticket import MakePolicy, Run, Ticket
from maskserve_engine.executor import CachedRow, DenseRow, Executor, RowMade
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.job import EditJob, Failed, Final
from maskserve_engine.output_thread import OutputThread
from maskserve_engine.requests.audits import Audits
from maskserve_engine.requests.primings import Primings
from maskserve_engine.requests.residency import Residency, Resource
from maskserve_engine.requests.state import EntryReads, PrimingState, RequestState
from maskserve_engine.requests.templates import DENSE, TemplateCache

_STARTS_MOST = 5
"""Times that it is decided how an edit runs: its template may be lost again before it has a row."""


class RequestManager:
    """Every accepted edit and every template being primed, from acceptance to its end."""

    def __init__(
        self,
        config: Config,
        adapter: Adapter,
        cache: TemplateCache,
        executor: Executor,
        audits: Audits,
        output: OutputThread,
        policy: MakePolicy = StepScheduler,
    ) -> None:
        self.config, self.adapter, self.output = config, adapter, output
        self.executor = executor
        self.cache, self.audits = cache, audits
        self.scheduler = policy(
            config.engine.max_rows, config.engine.max_waiting, config.cache.priming_share
        )
        self.edits: dict[str, RequestState] = {}
        self.primings = Primings(adapter, cache, self.scheduler, executor, self.arrived)
        self.residency = Residency(config.engine.max_waiting)
        self.draining = False
        self._listed: list[RequestState | PrimingState | None] = []
        """What was held and what ran when `_waiting` was made."""
        self._waiting: tuple[RowStatus, ...] = ()

    def accept(self, edit: RequestState) -> None:
        """Take an edit in, or answer at once why not."""
        try:
            self._enter(edit)
        except Exception as error:
            self.output.send(edit.sink, Failed(guarded(edit.request_id, error)))

    def schedule(self) -> tuple[Run, ...]:
        """Decide the next step: tell the expired, make rows for the admitted."""
        now = time.monotonic()
        self.audits.judge_arrived()
        late = [r for r, e in self.edits.items() if e.mode == "wait" and e.late(now)]
        for request_id in late:
            self.end(request_id, DeadlineExceeded("its deadline passed while the edit waited"))
        if not len(self.scheduler) and not self.draining:
            self._audit()
        decision = self.scheduler.schedule(now)
        for ticket in decision.expired:
            self.end(
                ticket.request_id, DeadlineExceeded("its deadline passed before the edit was done")
            )
        for ticket in decision.admitted:
            self._admit(ticket)
        return decision.runs

    def running(self, run: Run) -> list[RequestState | PrimingState]:
        """Of a run those that have a row now."""
        held: list[RequestState | PrimingState | None] = [
            self.edits.get(t.request_id) or self.primings.held.get(t.request_id) for t in run.rows
        ]
        return [edit for edit in held if edit is not None and edit.running]

    def cancel(self, request_id: str) -> None:
        self.end(request_id, Cancelled("the edit was cancelled"))

    def prime(self, job: EditJob) -> str:
        """Prime a template that nobody edits yet; its state: `primed`, `priming` or `absent`.

        Raises:
            Overloaded: the worker is draining.
        """
        if self.draining:
            raise Overloaded("the worker is draining")
        if self.cache.wants(job) == "absent" and self.cache.config.enabled:
            self.primings.begin(job, urgent=False)
        return self.cache.wants(job)

    def finish(self, edit: RequestState) -> None:
        """The row has taken its last step: answer."""
        latents = self.executor.result(edit.request_id)
        self._release(edit)
        if edit.audit is not None:
            self._leave(edit)
            self.audits.compare(edit.audit, latents)
            return
        self._leave(edit)
        worker, model = self.config.worker, model_name(self.config)

        def final() -> Final:
            array = latents.array()  # until then its steps have not ended
            return Final(array, edit.final_meta(worker, model), edit.timeline())

        lost = Failed(EngineFailed("the result did not come from the device"), edit.timeline())
        self.output.send_made(edit.sink, final, lost)
        if edit.mode == "cached" and not edit.tally.skipped:  # skipping is not the template's fault
            self.audits.offer(self.cache.key_of(edit.job), edit.job, latents)

    def _leave(self, edit: RequestState) -> None:
        """Its row has ended."""
        self.scheduler.finish(edit.request_id)
        self.edits.pop(edit.request_id)

    def end(self, request_id: str, error: MaskserveError) -> None:
        """Answer an edit that will not finish; its row and entries are let go."""
        edit = self.edits.pop(request_id, None)
        if edit is not None:
            self._release(edit)
            if edit.mode == "wait":
                self.residency.leave(request_id)
            self.scheduler.cancel(request_id)
            self.output.send(edit.sink, Failed(error, edit.timeline()))

    def end_all(self, error: MaskserveError) -> None:
        for request_id in list(self.edits):
            self.end(request_id, error)
        self.primings.end_all()

    def arrived(self, key: str) -> None:
        """A template can be read now, or will not be: those who waited go on, but for those whose
        template is still on its way.
        """
        for request_id in self.residency.arrived(Resource("template", key)):
            self._resume(self.edits.pop(request_id))

    def rows(self) -> tuple[tuple[RowStatus, ...], tuple[RowStatus, ...]]:
        """Status of what runs and of what waits; the latter is the same object for as long as the
        same edits wait.
        """
        held: dict[str, RequestState | PrimingState] = {**self.edits, **self.primings.held}
        running = [held[t.request_id] for t in self.scheduler.running if t.request_id in held]
        listed = [*held.values(), None, *running]
        if listed != self._listed:
            self._listed = listed
            names = {edit.request_id for edit in running}
            self._waiting = tuple(e.status() for name, e in held.items() if name not in names)
        return tuple([edit.status() for edit in running]), self._waiting

    def _enter(self, edit: RequestState) -> None:
        """Decide how the edit runs and queue it.

        Raises:
            MaskserveError: it is refused; nothing was kept of it.
        """
        if self.draining:
            raise Overloaded("the worker is draining; send the edit to another or try again later")
        self._start(edit)

    def _start(self, edit: RequestState) -> None:
        """Decide how it runs; queue it, or have it wait for its template.

        Raises:
            MaskserveError: it is refused.
        """
        if edit.starts == _STARTS_MOST:
            raise Overloaded(
                f"the edit's template was lost {edit.starts} times before the edit could begin "
                "(the cache may be too small for the templates in use); try again later"
            )
        self._route(edit)
        edit.starts += 1
        if edit.route.prime:
            self.primings.begin(edit.job, urgent=edit.mode == "wait")
        if edit.mode == "wait":
            self._wait(edit)
        else:
            self._queue(edit)

    def _wait(self, edit: RequestState) -> None:
        if not self.cache.is_coming(edit.route.key):
            asked = edit.job.request.settings.cache == "require"
            raise EngineFailed(
                f"SETTINGS.{'cache is require' if asked else 'reproducible is set'}, but the "
                "template could not be primed (it does not fit the cache's budget, or the worker "
                "is short of memory); with cache: off the edit needs no template"
            )
        self._check_id(edit)
        self.residency.wait(edit.request_id, edit.needs)
        edit.waited = True
        self.edits[edit.request_id] = edit

    def _route(self, edit: RequestState) -> None:
        """Decide how it runs. A template that has drifted serves those only who insist on it."""
        settings = edit.job.request.settings
        drift = self.audits.over_limit(self.cache.key_of(edit.job))
        if drift is not None and settings.cache == "auto" and not settings.reproducible:
            edit.drift, edit.route = drift, DENSE
        else:
            edit.route = self.cache.route(edit.job, edit.work.mask_ratio, again=edit.starts > 0)

    def _audit(self) -> None:
        """Make a cached edit again, now that nothing else is to be done."""
        audit = self.audits.next()
        if audit is None:
            return
        edit = RequestState.of(audit.again(), lambda event: None, self.adapter)
        edit.audit = audit
        with suppress(InvalidRequest):  # a client's edit has this very id
            self._queue(edit)

    def _queue(self, edit: RequestState) -> None:
        self._check_id(edit)
        self.scheduler.submit(edit.make_ticket())
        edit.times.queued = time.monotonic()
        self.edits[edit.request_id] = edit

    def _check_id(self, edit: RequestState) -> None:
        if edit.request_id in self.edits:
            raise InvalidRequest(
                "SETTINGS.request_id",
                f"{name_of(edit.request_id)!r} is still being served",
                "a new id",
            )

    def _resume(self, edit: RequestState) -> None:
        """An edit has waited for its template: decide again. One whose template was to come from
        files, and did not, has it primed.
        """
        tier = edit.route.tier
        try:
            self._start(edit)
        except Exception as error:
            failed = Failed(guarded(edit.request_id, error), edit.timeline())
            self.output.send(edit.sink, failed)
        if tier and edit.mode == "cached":
            edit.route = replace(edit.route, tier=tier)  # where it lay, and not where it came

    def _admit(self, ticket: Ticket) -> None:
        """Make the row; an edit whose row cannot be made is answered, and nobody else is hurt."""
        edit = self.edits.get(ticket.request_id)
        if edit is None:
            self.primings.admit(ticket.request_id)
            return
        try:
            edit.times.admitted = time.monotonic()
            made = self._make_row(edit)
            edit.running = True
            if edit.job.request.settings.insists and not made.complete:
                self._go_back(edit)
            else:
                self.cache.count(edit.route)
        except Exception as error:
            self.end(ticket.request_id, guarded(ticket.request_id, error))

    def _go_back(self, edit: RequestState) -> None:
        """Its template was evicted while it queued, and it may not go without."""
        self._release(edit)
        edit.running, edit.reads, edit.loads = False, None, None
        edit.times.queued = edit.times.admitted = 0.0
        edit.route = DENSE
        self.scheduler.cancel(edit.request_id)
        del self.edits[edit.request_id]
        self._resume(edit)

    def _make_row(self, edit: RequestState) -> RowMade:
        job, route = edit.job, edit.route
        if edit.mode != "cached":
            return self.executor.make(edit.request_id, DenseRow(job))
        seed, sure = self.cache.noise_seed(job), job.request.settings.insists
        spec = CachedRow(job, seed, route.key, route.anchors, sure)
        made = self.executor.make(edit.request_id, spec)
        edit.reads = EntryReads(route.key, route.anchors, made.selection)
        return made

    def _release(self, edit: RequestState) -> None:
        """Let go of its row, if it has one."""
        loads = self.executor.release(edit.request_id)
        if loads is not None:
            edit.loads = loads
