"""The manager: takes edits in, decides how each runs, and sees that each gets one final answer.

Plain bookkeeping between the scheduler, the cache and the rows; used by the engine thread only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from maskserve_core.config import Config, model_name
from maskserve_core.contracts.keys import name_of
from maskserve_core.contracts.request import Lora, ResolvedControl
from maskserve_core.contracts.reuse_levels import levels_of
from maskserve_core.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    MaskserveError,
    Overloaded,
    guarded,
)
from maskserve_core.models.registry import lora_work
from maskserve_core.planning.flops import ModelWork
from maskserve_core.worker.status import RowStatus
from maskserve_core.worker.step_scheduler import MakePolicy, Run, StepScheduler, Ticket
from maskserve_engine.adapters.control_net_loader import LoadedNet
from maskserve_engine.adapters.lora_loader import LoadedLora
from maskserve_engine.base.job import EditJob, Failed, FinalEvent
from maskserve_engine.base.mailbox import OutputThread
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.requests.audits import Audits
from maskserve_engine.requests.control_nets import KIND as CONTROL_NET
from maskserve_engine.requests.control_nets import EditControlNets
from maskserve_engine.requests.due_times import InTime
from maskserve_engine.requests.executor import CachedRowSpec, DenseRowSpec, Executor, RowMade
from maskserve_engine.requests.loras import KIND as LORA
from maskserve_engine.requests.loras import Loras, adapters_id
from maskserve_engine.requests.primings import Primings
from maskserve_engine.requests.residency import Residency, Resource
from maskserve_engine.requests.state import EntryReads, PrimingState, RequestState
from maskserve_engine.requests.templates import DENSE, TemplateCache

_ONLY_CACHED = "nothing of the kind comes about without a cache"
_STARTS_MOST = 5
"""Times that it is decided how an edit runs: its template may be lost again before it has a row."""


class RequestManager:
    """Every accepted edit and every template being primed, from acceptance to its end.

    Args:
        config: of this worker.
        adapter: the model.
        cache: of templates; None: all edits run dense.
        executor: of the rows.
        audits: of cached edits.
        output: takes events.
        in_time: refuses what would be too late.
        policy: makes what decides which rows run.
        make_loras: knows the worker's LoRAs; None: edits have none.
        make_nets: knows its ControlNets; None: edits have none.
        step_seconds: of an edit, by the number of devices; and what of each a step costs whatever
            its rows.
    """

    def __init__(
        self,
        config: Config,
        adapter: Adapter,
        cache: TemplateCache | None,
        executor: Executor,
        audits: Audits,
        output: OutputThread,
        in_time: InTime,
        policy: MakePolicy = StepScheduler,
        make_loras: Callable[[Residency], Loras] | None = None,
        make_nets: Callable[[Residency], EditControlNets] | None = None,
        step_seconds: Callable[[RequestState], tuple[tuple[float, ...], float]] = lambda edit: (
            (),
            0.0,
        ),
    ) -> None:
        self.config, self.adapter, self.output = config, adapter, output
        self.executor = executor
        self.cache, self.audits, self.in_time = cache, audits, in_time
        self.scheduler = policy(
            config.engine.max_rows, config.engine.max_waiting, config.cache.priming_share
        )
        self._step_seconds = step_seconds
        self.edits: dict[str, RequestState] = {}
        self.primings: Primings | None = None
        """None: edits have no templates."""
        if cache is not None:
            self.primings = Primings(
                adapter,
                cache,
                self.scheduler,
                executor,
                self._priming_ended,
                self._attach_to,
                lambda job: self._lora_works(job) if job.adapters else (),
            )
        self._priming = {} if self.primings is None else self.primings.held
        self.residency = Residency(
            config.engine.max_waiting,
            {LORA: config.adapters.device_bytes, CONTROL_NET: config.controls.device_bytes},
            self._dropped,
        )
        self.loras = None if make_loras is None else make_loras(self.residency)
        """None: edits have none."""
        self.nets = None if make_nets is None else make_nets(self.residency)
        """None: edits have none."""
        self._late: dict[str, RequestState] = {}
        """Rows that run, and whose LoRAs are not here yet (`adapters: fast`)."""
        self.draining = False
        self.again = math.inf
        """When `schedule` has something to decide even if nothing happens until then, on
        time.monotonic's clock."""
        self._listed: list[RequestState | PrimingState | None] = []
        """What was held and what ran when `_waiting` was made."""
        self._waiting: tuple[RowStatus, ...] = ()

    def accept(self, edit: RequestState) -> None:
        """Take an edit in, or answer at once why not."""
        try:
            self._enter(edit)
        except Exception as error:
            if self.edits.get(edit.request_id) is None:  # no other edit has this id
                self._let_go(edit.request_id)
            self.output.send(edit.sink, Failed(guarded(edit.request_id, error)))

    def holds(self, edit: RequestState | PrimingState) -> bool:
        """Whether it has not ended."""
        held = self.edits if isinstance(edit, RequestState) else self._priming
        return held.get(edit.request_id) is edit

    def schedule(self) -> tuple[Run, ...]:
        """Decide the next step: tell the expired, make rows for the admitted."""
        now = time.monotonic()
        self.audits.judge_arrived()
        late = [r for r, e in self.edits.items() if e.waiting and e.late(now)]
        for request_id in late:
            self.end(request_id, DeadlineExceeded("its deadline passed while the edit waited"))
        for edit in list(self._late.values()):
            if edit.tally.done >= edit.loras.without:
                self._park(edit)
        if not len(self.scheduler) and not self.draining:
            self._audit()
        decision = self.scheduler.schedule(now, self.executor.devices)
        for ticket in decision.expired:
            self.end(
                ticket.request_id, DeadlineExceeded("its deadline passed before the edit was done")
            )
        for ticket in decision.admitted:
            self._admit(ticket)
        self.again = decision.again
        return decision.runs

    def running(self, run: Run) -> list[RequestState | PrimingState]:
        """Of a run those that have a row now."""
        held: list[RequestState | PrimingState | None] = [
            self.edits.get(t.request_id) or self._priming.get(t.request_id) for t in run.rows
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
        if self.cache is None or self.primings is None:
            return "absent"
        if self.cache.wants(job) == "absent":
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

        def final() -> FinalEvent:
            array = latents.array()  # until then its steps have not ended
            return FinalEvent(array, edit.final_meta(worker, model), edit.timeline())

        lost = Failed(EngineFailed("the result did not come from the device"), edit.timeline())
        self.output.send_made(edit.sink, final, lost)
        # Neither skipping nor steps without LoRAs are the template's fault.
        if edit.mode == "cached" and not edit.tally.skipped and edit.loras.always:
            assert self.cache is not None, _ONLY_CACHED
            self.audits.offer(self.cache.key_of(edit.job), edit.job, latents)

    def _leave(self, edit: RequestState) -> None:
        """Its row has ended."""
        self.scheduler.finish(edit.request_id)
        self.edits.pop(edit.request_id)
        self._let_go(edit.request_id)

    def _let_go(self, owner: str) -> None:
        """An edit or a priming has ended: its LoRAs and ControlNets may make room."""
        self._late.pop(owner, None)
        if self.loras is not None:
            self.loras.let_go(owner)
        if self.nets is not None:
            self.nets.let_go(owner)

    def end(self, request_id: str, error: MaskserveError) -> None:
        """Answer an edit that will not finish; its row and entries are let go."""
        edit = self.edits.pop(request_id, None)
        if edit is not None:
            self._release(edit)
            self.residency.leave(request_id)
            self._let_go(request_id)
            self.scheduler.cancel(request_id)
            self.output.send(edit.sink, Failed(error, edit.timeline()))

    def end_all(self, error: MaskserveError) -> None:
        for request_id in list(self.edits):
            self.end(request_id, error)
        if self.primings is not None:
            self.primings.end_all()

    def arrived(self, key: str) -> None:
        """Entries of a template were read or written by the tiers in files. While more of it is on
        its way, those who wait for it go on waiting.
        """
        assert self.cache is not None, _ONLY_CACHED
        if not self.cache.is_coming(key):
            self._end_waits(key)

    def _priming_ended(self, key: str) -> None:
        self._let_go(f"prime:{key}")
        self._end_waits(key)

    def _end_waits(self, key: str) -> None:
        """A template can be read now, or will not be: it is decided anew how its edits run."""
        for request_id in self.residency.arrived(Resource("template", key)):
            self._resume(self.edits.pop(request_id))

    def lora_came(self, lora: Lora, outcome: LoadedLora | MaskserveError) -> None:
        """A LoRA is on the device, or will not be: who waited for it goes on, or is answered."""
        assert self.loras is not None
        if isinstance(outcome, MaskserveError):
            self.executor.drop(lora.version)
            hurt = set(self.loras.failed(lora, outcome))
            hurt |= {name for name, e in self._late.items() if lora in e.loras.wanted}
            for request_id in hurt:
                self.end(request_id, outcome)
            return
        ready = self.loras.arrived(lora, outcome)
        for edit in list(self._late.values()):
            try:
                if not self._absent(edit):
                    self._attach(edit)
            except Exception as error:
                self.end(edit.request_id, guarded(edit.request_id, error))
        for request_id in ready:
            edit = self.edits[request_id]
            self._end_wait(edit)
            if edit.running:
                self._unpark(edit)
            else:
                self._resume(self.edits.pop(request_id))

    def net_came(self, control: ResolvedControl, outcome: LoadedNet | MaskserveError) -> None:
        """A ControlNet is on the device, or will not be: who waited goes on, or is answered."""
        assert self.nets is not None
        if isinstance(outcome, MaskserveError):
            self.executor.drop_net(control.version)
            for request_id in self.nets.failed(control, outcome):
                self.end(request_id, outcome)
            return
        for request_id in self.nets.arrived(control, outcome):
            self._end_wait(self.edits[request_id])
            self._resume(self.edits.pop(request_id))

    def rows(self) -> tuple[tuple[RowStatus, ...], tuple[RowStatus, ...]]:
        """Status of what runs and of what waits; the latter is the same object for as long as the
        same edits wait.
        """
        held: dict[str, RequestState | PrimingState] = {**self.edits, **self._priming}
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
        nets, loras = self._absent_nets(edit), self._absent(edit)
        if nets or (loras and not self._may_begin_without(edit)):
            self._wait(edit, (*nets, *loras))
            return
        if not loras:
            self._name_adapters(edit)
        self._route(edit)
        if not loras:
            self._wait_if_in_time(edit)
        edit.levels = levels_of(
            edit.job.request.settings, self.adapter.facts, cached=edit.mode == "cached"
        )
        if not edit.starts:
            self._check_in_time(edit)
        edit.starts += 1
        if edit.route.prime:
            waits = edit.mode == "wait"
            self._prime(edit.job, urgent=waits, due=edit.make_ticket().due if waits else None)
        insists = edit.job.request.settings.insists
        if edit.mode == "wait" and not insists and not self._is_coming(edit):
            edit.route = replace(DENSE, outcome="miss", key=edit.route.key)
        if edit.mode == "wait":
            self._wait_for_template(edit)
        else:
            self._queue(edit)

    def _is_coming(self, edit: RequestState) -> bool:
        assert self.cache is not None, _ONLY_CACHED
        return self.cache.is_coming(edit.route.key)

    def _wait_if_in_time(self, edit: RequestState) -> None:
        """An edit that would be late without its template waits for it to be primed, if it is in
        time then; once.
        """
        if edit.starts or edit.route.outcome != "miss" or self.cache is None:
            return
        assert self.primings is not None, _ONLY_CACHED
        found = self.cache.behind_priming(edit.job)
        if found is None:
            return
        route, anchors = found
        left = anchors if route.prime else self.primings.left(route.key)
        tickets = self.scheduler.running
        running = [self.edits[t.request_id] for t in tickets if t.request_id in self.edits]
        if left is not None and self.in_time.gains_by_waiting(edit, route, left, running):
            edit.route = route

    def _check_in_time(self, edit: RequestState) -> None:
        """Refuse it at once if it would be dropped on its way.

        Raises:
            MaskserveError: it would.
        """
        if edit.deadline is None:
            return

        def edits(tickets: Sequence[Ticket]) -> list[RequestState]:
            return [self.edits[t.request_id] for t in tickets if t.request_id in self.edits]

        running, waiting = edits(self.scheduler.running), edits(self.scheduler.waiting)
        self.in_time.check(edit, running, waiting, time.monotonic())

    def _prime(self, job: EditJob, *, urgent: bool, due: float | None = None) -> None:
        """Have a job's template primed, with the adapters that its entries are named by."""
        assert self.cache is not None, _ONLY_CACHED
        assert self.primings is not None, _ONLY_CACHED
        if self.loras is not None and job.adapters:
            self.loras.hold(f"prime:{self.cache.key_of(job)}", job.request.used_loras)
        self.primings.begin(job, urgent=urgent, due=due)

    def _wait(self, edit: RequestState, resources: Sequence[Resource]) -> None:
        """Have it wait until these are here.

        Raises:
            MaskserveError: no more edits may wait.
        """
        if not edit.running:
            self._check_id(edit)
        self.residency.wait(edit.request_id, resources)
        edit.waited = edit.waiting = True
        edit.stopped = time.monotonic()
        self.edits[edit.request_id] = edit

    def _end_wait(self, edit: RequestState) -> None:
        edit.waiting = False
        if edit.mode == "wait":
            return
        waited = time.monotonic() - edit.stopped
        if edit.loras.wanted and self.loras is not None:
            edit.loras.waited_s += waited
            self.loras.waited(waited)
        if edit.controls.wanted and self.nets is not None:
            edit.controls.waited_s += waited
            self.nets.waited(waited)

    def _wait_for_template(self, edit: RequestState) -> None:
        assert self.cache is not None, _ONLY_CACHED
        if not self.cache.is_coming(edit.route.key):
            asked = edit.job.request.settings.cache == "require"
            raise EngineFailed(
                f"SETTINGS.{'cache is require' if asked else 'reproducible is set'}, but the "
                "template could not be primed (it does not fit the cache's budget, or the worker "
                "is short of memory); with cache: off the edit needs no template"
            )
        self._wait(edit, (Resource("template", edit.route.key),))

    # ControlNets.

    def _absent_nets(self, edit: RequestState) -> tuple[Resource, ...]:
        """Of the edit's ControlNets those that are not on the device; they are brought there.

        Raises:
            MaskserveError: one of them cannot be had.
        """
        controls = edit.controls
        if not controls.wanted:
            return ()
        if self.nets is None:
            raise InvalidRequest(
                "SETTINGS.controls", "ControlNets are not served here", "no controls"
            )
        absent = self.nets.hold(edit.request_id, controls.wanted)
        if not absent:
            controls.digests = tuple([self.nets.digest(each) for each in controls.wanted])
        return absent

    # LoRAs.

    def _absent(self, edit: RequestState) -> tuple[Resource, ...]:
        """Of the edit's LoRAs those that are not on the device; they are brought there.

        Raises:
            MaskserveError: one of them cannot be had.
        """
        if not edit.loras.wanted:
            return ()
        if self.loras is None:
            raise InvalidRequest("SETTINGS.loras", "adapters are not served here", "no loras")
        return self.loras.hold(edit.request_id, edit.loras.wanted)

    def _may_begin_without(self, edit: RequestState) -> bool:
        """Whether first steps may go without its LoRAs. As many rows as the batch has may."""
        settings = edit.job.request.settings
        if settings.adapters != "fast" or settings.insists or self.loras is None:
            return False
        sigmas = self.adapter.sigmas(edit.job)
        each = [self.loras.steps_without(lora, sigmas) for lora in edit.loras.wanted]
        edit.loras.without = min(each)
        begun = sum(each.loras.late for each in self.edits.values())
        return edit.loras.without > 0 and begun < self.config.engine.max_rows

    def _name_adapters(self, edit: RequestState) -> None:
        """The edit's LoRAs are here: from now on its entries are those made with them."""
        if not edit.loras.wanted or self.loras is None:
            return
        edit.loras.digests = tuple([self.loras.digest(lora) for lora in edit.loras.wanted])
        edit.loras.nbytes, edit.said = self.loras.file_bytes(edit.loras.wanted), None
        work = self.adapter.work(*edit.job.moments.shape[1:])
        edit.work = edit.work.with_loras(self._lora_works(edit.job), work)
        if self.config.adapters.entries == "own":
            scales = [lora.scale for lora in edit.loras.wanted]
            name = adapters_id(list(zip(edit.loras.digests, scales, strict=True)))
            edit.job = replace(edit.job, adapters=name)

    def _lora_works(self, job: EditJob) -> list[ModelWork]:
        """What its LoRAs, which are here, add to the model's work."""
        assert self.loras is not None
        work, facts = self.adapter.work(*job.moments.shape[1:]), self.adapter.facts
        return [lora_work(facts, work, self.loras.layers(lora)) for lora in job.request.used_loras]

    def _attach(self, edit: RequestState) -> None:
        """LoRAs have come while the row ran: its next steps have them, and their entries."""
        self._name_adapters(edit)
        edit.loras.from_step, edit.loras.late = edit.tally.done, False
        self._late.pop(edit.request_id, None)
        wanted = edit.loras.wanted
        self.executor.attach(edit.request_id, [(lora.version, lora.scale) for lora in wanted])
        if edit.mode != "cached" or not edit.job.adapters:
            return
        assert self.cache is not None, _ONLY_CACHED
        own = self.cache.route(edit.job)
        if own.prime:
            self._prime(edit.job, urgent=False)
        if own.mode == "cached":  # else those of the base model do
            edit.route = own
            self.executor.read(edit.request_id, own.key, own.anchors)
            assert edit.reads is not None
            edit.reads = EntryReads(own.key, own.anchors, edit.reads.selection)

    def _attach_to(self, row: str, job: EditJob) -> None:
        """Have a row that primes computed with the LoRAs that its entries are named by."""
        if job.adapters:
            wanted = job.request.used_loras
            self.executor.attach(row, [(lora.version, lora.scale) for lora in wanted])

    def _park(self, edit: RequestState) -> None:
        """Its next step needs its LoRAs: until they are here it has no place in the batch."""
        del self._late[edit.request_id]
        self.scheduler.cancel(edit.request_id)
        try:
            absent = self._absent(edit)
            if absent:
                self._wait(edit, absent)
            else:
                self._unpark(edit)
        except MaskserveError as error:
            self.end(edit.request_id, error)

    def _unpark(self, edit: RequestState) -> None:
        """What a parked row has waited for is here: it takes its turn again, as the oldest."""
        self._attach(edit)
        try:
            self.scheduler.submit(edit.make_ticket())
        except MaskserveError as error:
            self.end(edit.request_id, error)

    def _dropped(self, resource: Resource) -> None:
        """It has to make room."""
        if resource.kind == CONTROL_NET:
            assert self.nets is not None
            self.nets.dropped(resource)
            self.executor.drop_net(resource.name)
            return
        if self.loras is not None:
            self.loras.dropped(resource)
        self.executor.drop(resource.name)

    def _route(self, edit: RequestState) -> None:
        """Decide how it runs. A template that has drifted serves those only who insist on it."""
        if self.cache is None:
            edit.route = DENSE
            return
        settings = edit.job.request.settings
        drift = self.audits.over_limit(self.cache.key_of(edit.job))
        if drift is not None and settings.cache == "auto" and not settings.reproducible:
            edit.drift, edit.route = drift, DENSE
        else:
            edit.route = self.cache.route(edit.job, again=edit.starts > 0)

    def _audit(self) -> None:
        """Make a cached edit again, now that nothing else is to be done."""
        audit = self.audits.next()
        if audit is None:
            return
        edit = RequestState.of(audit.again(), lambda event: None, self.adapter)
        edit.audit = audit
        with suppress(MaskserveError):  # a client's edit has this very id, or a LoRA is gone
            if self._absent_nets(edit) or self._absent(edit):
                self._let_go(edit.request_id)
            else:
                self._queue(edit)

    def _queue(self, edit: RequestState) -> None:
        self._check_id(edit)
        edit.seconds, edit.shared = self._step_seconds(edit)
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
        """An edit has waited: decide again. One whose template was to come from
        files, and did not, has it primed.
        """
        tier, edit.waiting = edit.route.tier, False
        try:
            self._start(edit)
        except Exception as error:
            self._let_go(edit.request_id)
            failed = Failed(guarded(edit.request_id, error), edit.timeline())
            self.output.send(edit.sink, failed)
        if tier and edit.mode == "cached":
            edit.route = replace(edit.route, tier=tier)  # where it lay, and not where it came

    def _admit(self, ticket: Ticket) -> None:
        """Make the row; an edit whose row cannot be made is answered, and nobody else is hurt."""
        edit = self.edits.get(ticket.request_id)
        if edit is None:
            assert self.primings is not None, _ONLY_CACHED
            self.primings.admit(ticket.request_id)
            return
        if edit.running:
            return  # its row was parked
        try:
            edit.times.admitted = time.monotonic()
            made = self._make_row(edit)
            edit.running = True
            if edit.job.request.settings.insists and not made.complete:
                self._go_back(edit)
            elif self.cache is not None:
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
        made = self._make_plain_row(edit)
        edit.loras.late = bool(edit.loras.wanted) and bool(self._absent(edit))
        if edit.loras.late:
            self._late[edit.request_id] = edit
        elif edit.loras.wanted:
            pairs = [(lora.version, lora.scale) for lora in edit.loras.wanted]
            self.executor.attach(edit.request_id, pairs)
        return made

    def _make_plain_row(self, edit: RequestState) -> RowMade:
        if edit.levels:
            level = self.in_time.level(edit, self._beside(edit), time.monotonic())
            if level is not None:
                edit.step_down(level, self.adapter)
        job, route = edit.job, edit.route
        if edit.mode != "cached":
            return self.executor.make(edit.request_id, DenseRowSpec(job))
        seed, sure = job.request.template_noise_seed, job.request.settings.insists
        spec = CachedRowSpec(job, seed, route.key, route.anchors, sure)
        made = self.executor.make(edit.request_id, spec)
        edit.reads = EntryReads(route.key, route.anchors, made.selection)
        return made

    def _beside(self, edit: RequestState) -> list[RequestState]:
        """Edits that have a row, but for this one."""
        return [each for each in self.edits.values() if each.running and each is not edit]

    def _release(self, edit: RequestState) -> None:
        """Let go of its row, if it has one."""
        loads = self.executor.release(edit.request_id)
        if loads is not None:
            edit.loads = loads
