"""The state of each accepted edit and of each template being primed, and the table of the edits."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from maskserve_common.contracts.due_times import due_by_size
from maskserve_common.contracts.keys import STILL, Anchor
from maskserve_common.contracts.request import Lora, ResolvedControl, predicted_steps
from maskserve_common.contracts.reuse_levels import ReuseLevel, levels_of, with_template
from maskserve_common.contracts.settings import acting, shares
from maskserve_common.contracts.status_record import Kind, RowStatus
from maskserve_common.resources.resource_states import Resource, ResourceStates
from maskserve_engine.base.job import EditJob, Sink
from maskserve_engine.batch.step_cache import RefreshSchedule
from maskserve_engine.cache.tier import Note
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.planning.flops import Totals
from maskserve_engine.planning.regions import Bools
from maskserve_engine.requests.audits import Audit
from maskserve_engine.requests.control_nets import ControlNetSource
from maskserve_engine.requests.execution_plan import DENSE, ControlWork, EditWork, ExecutionPlan
from maskserve_engine.requests.executor import RowLoads, RowReport, RowStep
from maskserve_engine.scheduling.step_scheduler import SchedulingPolicy, Ticket, id_in_use
from maskserve_engine.spec.model_spec import ModelSpec


@dataclass(slots=True)
class EditTimes:
    """When an edit reached each stage, in time.monotonic() seconds; 0: not yet."""

    submitted: float
    """When it was put into the engine's inbox."""
    queued: float = 0.0
    admitted: float = 0.0
    first_step: float = 0.0
    """When its first step was done."""


@dataclass(slots=True)
class StepTally:
    """Sums over the steps that an edit has taken."""

    done: int = 0
    """Steps taken."""
    rows_in_batches: int = 0
    """Rows in the batch, summed over the steps."""
    computed_tokens: int = 0
    """Tokens that one pass of each step computed, summed."""
    dense: list[int] = field(default_factory=list)
    """Steps that read nothing, or computed a lookahead."""
    text: int = 0
    """Steps that computed the text, in their own pass or in a lookahead."""
    plans: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """Number of steps by the kinds of their blocks."""

    def add(self, step: RowStep, rows: int, kinds: tuple[str, ...]) -> tuple[str, ...]:
        """Add a step; return the kinds of the blocks that it ran.

        Args:
            step: step just taken.
            rows: number of rows in the batch.
            kinds: kinds of the batch's blocks.
        """
        self.done = step.done
        if not step.read or step.looked_ahead:
            self.dense.append(step.done - 1)
        self.text += step.text or step.looked_ahead
        self.rows_in_batches += rows
        self.plans[kinds] += 1
        return kinds

    def kinds(self) -> dict[str, int]:
        kinds: Counter[str] = Counter()
        for plan, steps in self.plans.items():
            kinds.update({kind: steps * count for kind, count in Counter(plan).items()})
        return dict(kinds)


class ReadSchedule:
    """Reads of a cached row by step, and the steps that compute more than its computed tokens.

    Args:
        key: cache key of the template.
        anchors: anchor that each step reads; None: it computes all tokens.
        selection: digest of the tokens, equal for rows that read the same.
    """

    def __init__(self, key: str, anchors: Sequence[Anchor | None], selection: bytes) -> None:
        self.key, self.anchors, self.selection = key, tuple(anchors), selection
        self._steps = Counter(self.anchors)
        self.reads_step_cache = False
        """Whether the row reads its own step cache, which its refresh steps fill."""
        self.refreshes = frozenset[int]()
        """Steps that compute a refresh step's tokens."""
        self.lookahead_steps = frozenset[int]()
        """Steps that compute a lookahead beside their own tokens."""
        self.text: frozenset[int] | None = None
        """Steps that compute the text; None: all."""
        self.steps_delayed = 0
        """Steps of the batch for which its next refresh step has waited."""
        self.refreshed_at = 0
        """Last refresh step taken."""

    @classmethod
    def of_schedule(
        cls, request_id: str, schedule: RefreshSchedule, sigmas: Sequence[tuple[float, float]]
    ) -> ReadSchedule:
        """Return the reads of a row that uses its step cache at all but its dense steps."""
        reads = cls(f"own:{request_id}", [Anchor(*at) for at in sigmas], request_id.encode())
        reads.reads_step_cache, reads.text = True, frozenset() if schedule.text else None
        reads.follow(schedule)
        return reads

    def follow(self, schedule: RefreshSchedule) -> None:
        """Read the step cache at all but the dense steps of a schedule."""
        self.anchors = tuple(
            None if step in schedule.dense else anchor for step, anchor in enumerate(self.anchors)
        )
        self.refreshes, self.lookahead_steps = schedule.computed_at, schedule.lookahead_steps

    @classmethod
    def of_template(
        cls, key: str, anchors: Sequence[Anchor | None], report: RowReport
    ) -> ReadSchedule:
        """Return the reads of a row that reads a template, with its step cache."""
        reads, schedule = cls(key, anchors, report.selection), report.schedule
        if schedule is not None and schedule.text:
            reads.text, reads.lookahead_steps = schedule.dense, schedule.lookahead_steps
        return reads

    def of_entries(self, key: str, anchors: Sequence[Anchor | None]) -> ReadSchedule:
        """Return the reads of other entries with the same text and lookahead steps."""
        reads = ReadSchedule(key, anchors, self.selection)
        reads.text, reads.lookahead_steps = self.text, self.lookahead_steps
        return reads

    def leaves_out_text(self, step: int) -> bool:
        """Whether a step that reads only keys and values leaves the text out."""
        return self.text is not None and step not in self.text

    def refreshes_at(self, step: int) -> bool:
        """Whether the step computes a refresh step's tokens."""
        return step in self.refreshes

    def looks_ahead(self, step: int) -> bool:
        return step in self.lookahead_steps

    def is_dense(self, step: int) -> bool:
        """Whether the step computes all tokens to fill the step cache."""
        return self.reads_step_cache and self.anchors[step] is None

    def stays(self, step: int) -> int:
        """Return the number of the row's steps that read the same entry."""
        return self._steps[self.anchors[step]]

    def drop_entry(self, step: int) -> None:
        """Compute all tokens at steps that read this step's entry: it will not arrive."""
        lost_anchor = self.anchors[step]
        self.anchors = tuple(None if anchor == lost_anchor else anchor for anchor in self.anchors)


A = TypeVar("A")


@dataclass(slots=True)
class AdapterUse(Generic[A]):
    """Progress of an edit's adapters of one kind."""

    effective: tuple[A, ...] = ()
    """Adapters that change anything in any step."""
    digests: tuple[str, ...] = ()
    """Digests of the files of `effective`, once these are loaded."""
    waited_s: float = 0.0

    @property
    def absent(self) -> bool:
        return bool(self.effective) and not self.digests


@dataclass(slots=True)
class LoraUse(AdapterUse[Lora]):
    steps_without: int = 0
    """Number of steps that the row may take before they are loaded."""
    late: bool = False
    """Whether the row runs before they are loaded."""
    from_step: int = 0
    """First step computed with them."""
    nbytes: int = 0
    """Bytes of the files of loaded LoRAs."""

    @property
    def always(self) -> bool:
        """Whether all steps so far were computed with them."""
        return not self.late and not self.from_step


@dataclass(slots=True)
class ControlUse(AdapterUse[ResolvedControl]):
    requested: tuple[ResolvedControl, ...] = ()
    stalled_s: float = 0.0
    """Seconds that its steps have waited for a ControlNet service, for other rows
    of the batch too.
    """
    stale_steps: int = 0
    """Steps that added a service's residuals requested one step ahead (`adapters: fast`)."""


@dataclass(slots=True, eq=False)
class RequestState:
    """One accepted edit."""

    job: EditJob
    sink: Sink
    work: EditWork
    times: EditTimes
    deadline: float | None
    """time.monotonic() after which the edit is dropped; None: never."""
    due_ms: int | None = None
    """Milliseconds from acceptance until its answer is due; None: it has no due time."""
    due: float | None = None
    """time.monotonic() at which its last step must end for its answer to be in time."""
    plan: ExecutionPlan = DENSE
    """Execution plan of the edit."""
    work_left: EditWork | None = None
    """Its counted work with the mean cached step of the steps left, for an edit whose lookahead
    errors place its refresh steps; None: the mean of all its steps holds.
    """
    levels: tuple[ReuseLevel, ...] = ()
    """Reuse levels that it may step down to as it gets its row."""
    level: ReuseLevel | None = None
    """Reuse level that it has stepped down to; None: none."""
    drift: float | None = None
    """Drift of its template, if that is why it runs dense."""
    seconds: tuple[float, ...] = ()
    """`Ticket.seconds`."""
    shared: float = 0.0
    """`Ticket.shared`."""
    plans_chosen: int = 0
    """Number of plans chosen for it so far."""
    waited: bool = False
    """Whether it has waited for a resource."""
    waiting: bool = False
    """Whether it waits for a resource. It is not queued then, and a row that it has is parked."""
    waiting_since: float = 0.0
    """When it last began to wait; 0: never."""
    loras: LoraUse = field(default_factory=LoraUse)
    controls: ControlUse = field(default_factory=ControlUse)
    running: bool = False
    reads: ReadSchedule | None = None
    """Reads of a cached row, from admission on."""
    loads: RowLoads | None = None
    """Loads of a cached row that has ended."""
    step_cache_bytes: int = 0
    region: Bools | None = None
    """Tokens that an edit without a mask has found to change, [rows, columns]; None: it computes
    all tokens."""
    joined_tokens: int = 0
    """Tokens of the region that have joined at refresh steps."""
    tally: StepTally = field(default_factory=StepTally)
    overflowed: int | None = None
    """Step whose preview was not finite, as the output thread has seen; None: none was."""
    audit: Audit | None = None
    """The cached edit that this one makes again; it has no client."""
    row_status: RowStatus | None = None
    """Status of its row, cached between steps."""
    request_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.request_id = self.job.request.request_id

    @classmethod
    def of(
        cls,
        job: EditJob,
        sink: Sink,
        adapter: Adapter,
        times_ms: tuple[int, ...] = (),
        nets: ControlNetSource | None = None,
    ) -> RequestState:
        """Return the state of an edit that goes to the engine's thread now; its deadline counts
        from its acceptance.

        Args:
            job: the edit.
            sink: receiver of its events.
            adapter: the model.
            times_ms: due times by size, for edits that set none.
            nets: source of the worker's ControlNets.

        Raises:
            MaskserveError: one of its ControlNets is no longer served.
        """
        request, now_s = job.request, time.monotonic()
        accepted_s = now_s + (request.accepted_ns - time.time_ns()) / 1e9
        limit_ms, due_ms = request.settings.deadline_ms, request.due_ms
        if due_ms is None:
            due_ms = due_by_size(times_ms, math.prod(request.model_size))
        loras, work = LoraUse(request.used_loras), EditWork.of(job, adapter)
        if nets is not None and request.controls:
            schedule = adapter.net_schedule(job, request.controls)
            control_work = ControlWork.of(
                job, adapter.spec, work.totals, work.steps, nets, schedule
            )
            work = replace(work, controls=control_work)
        acting_controls = acting(request.controls, work.steps)
        controls = ControlUse(acting_controls, requested=request.controls)
        after_s = request.after_token_s * work.total_tokens
        return cls(
            job=job,
            sink=sink,
            work=work,
            times=EditTimes(now_s),
            deadline=None if limit_ms is None else accepted_s + limit_ms / 1e3,
            due_ms=due_ms,
            due=None if due_ms is None else accepted_s + due_ms / 1e3 - after_s,
            loras=loras,
            controls=controls,
        )

    @property
    def totals(self) -> Totals:
        return self.work.totals

    def totals_of(self, step: RowStep) -> Totals | None:
        """Return the totals of the step just taken; None: it also computed its references."""
        if step.computed_references:
            return None
        return self.work.reading(text=step.text) if step.read else self.work.totals

    def control_flops(self, step: RowStep) -> float:
        """Return the FLOPs of its ControlNets in the step just taken."""
        controls = self.work.controls
        if controls is None:
            return 0.0
        return controls.at(step.done - 1, cached=step.read, looked_ahead=step.looked_ahead)

    def computed_tokens(self, step: RowStep) -> int:
        """Return the tokens that one pass of the step just taken computed."""
        if not step.read:
            return self.work.total_tokens
        row_tokens = self.work.reading(text=step.text).active[0] / self.work.passes
        return round(row_tokens + (self.work.lookahead.tokens if step.looked_ahead else 0.0))

    @property
    def _dense_shares(self) -> tuple[float, float]:
        """Shares of a cached edit's steps that compute all tokens, and of those that compute
        nothing else; 0 for others. If its errors place its refresh steps, of the steps left.
        """
        if self.plan.mode != "cached":
            return 0.0, 0.0
        plan, steps = self.plan, self.work.steps
        if plan.schedule is None:
            return plan.dense_steps / steps, plan.dense_steps / steps
        return plan.schedule.shares(steps, self._priced_from)

    @property
    def _priced_from(self) -> int:
        """Steps taken before those that its prices are about."""
        schedule, done = self.plan.schedule, self.tally.done
        is_moving = schedule is not None and schedule.control is not None
        return done if is_moving and done < self.work.steps else 0

    @property
    def dense_share(self) -> float:
        """Share of a cached edit's steps that compute all tokens; 0 for others."""
        return self._dense_shares[0]

    @property
    def flops(self) -> float:
        """Mean FLOPs of one of its steps alone."""
        work = self.work_left or self.work
        return work.step_flops(self.plan.mode, self.plan.unread_share)

    @property
    def step_tokens(self) -> int:
        """Mean tokens that one of its steps computes."""
        return self.work.tokens(self.plan.mode, *self._dense_shares)

    @property
    def due_at(self) -> float | None:
        """time.monotonic() at which its last step should have ended: its due time or, without one,
        its deadline; None: it has neither.
        """
        return self.deadline if self.due is None else self.due

    def has_expired(self, now: float) -> bool:
        """Whether the edit is to be dropped at `now`, in time.monotonic() seconds."""
        return self.deadline is not None and self.deadline <= now

    def make_ticket(self) -> Ticket:
        """Return the ticket for the scheduler.

        A reproducible edit shares its steps with no other: kernels round differently for batches of
        other shapes.
        """
        work, is_exclusive = self.work, self.job.request.settings.reproducible
        return Ticket(
            request_id=self.request_id,
            steps=work.steps - self.tally.done,
            total_tokens=work.passes * work.total_tokens,
            active_tokens=self.step_tokens,
            arrival=self.times.submitted,
            priority=self.job.request.settings.priority,
            deadline=self.deadline,
            background=self.audit is not None,
            batch_key=(work.batch_key, self.request_id) if is_exclusive else work.batch_key,
            cost=self.flops,
            due=self.due_at,
            seconds=self.seconds,
            shared=self.shared,
            rows=1 + (len(self.job.references) + 1) // 2,
        )

    def status(self) -> RowStatus:
        """Return its status, with the steps left now; cached since its plan was chosen."""
        kind: Kind = "cached" if self.plan.mode == "cached" else "dense"
        steps_left = self.work.steps - self.tally.done
        if self.row_status is None or self.row_status.kind != kind:
            self.row_status = RowStatus(
                request_id=self.request_id,
                kind=kind,
                active_tokens=self.work.tokens(self.plan.mode),
                total_tokens=self.work.passes * self.work.total_tokens,
                steps_left=steps_left,
                template_id=self.job.request.template_id,
                priority=self.job.request.settings.priority,
                due_ns=0 if self.due is None else int(1e9 * self.due),
                controls=shares(self.controls.effective, self.work.steps),
                adapter_bytes=self.loras.nbytes,
                dense_share=self.dense_share,
                own=self.plan.schedule is not None,
            )
        self.row_status.steps_left = steps_left
        return self.row_status

    @property
    def refresh_error(self) -> float | None:
        """Mean relative error of its lookaheads, once its row has ended; None: it had none."""
        errors = {} if self.loads is None else self.loads.refresh_errors
        return sum(errors.values()) / len(errors) if errors else None

    def set_plan(self, plan: ExecutionPlan, adapter: Adapter) -> None:
        """Set the execution plan, and with it the work and the reuse levels."""
        self.plan, self.work, self.row_status = plan, self.work_of(plan, adapter), None
        self.work_left = None
        if self._priced_from:
            self.work_left = self.work_of(plan, adapter, self._priced_from)
        self.levels = self._levels(adapter.spec)

    def work_of(self, plan: ExecutionPlan, adapter: Adapter, done: int = 0) -> EditWork:
        """Return the counted work of the edit with a plan, after `done` steps."""
        plain, schedule = self.work.without_schedule(), plan.schedule or plan.schedule_with_template
        if schedule is None or not schedule.refresh_steps:
            return plain
        between = adapter.totals(self.job, schedule)
        refresh = None
        if plan.schedule is None:
            refresh = adapter.totals(self.job, schedule, refresh=True)
        return plain.with_schedule(schedule, between, refresh, done)

    def step_flops(self, plan: ExecutionPlan, adapter: Adapter, done: int = 0) -> float:
        """Return the mean FLOPs of one of its steps alone with a plan, after `done` steps; plans
        are compared by it.
        """
        return self.work_of(plan, adapter, done).step_flops(plan.mode, plan.unread_share)

    def _levels(self, spec: ModelSpec) -> tuple[ReuseLevel, ...]:
        settings, schedule = self.job.request.settings, self.plan.schedule
        measured, steps = spec.measured_levels, self.work.steps + predicted_steps(settings)
        if schedule is not None and schedule.control is not None:
            return ()  # levels have places of their own
        if schedule is not None:
            return levels_of(settings, measured, "own", steps, len(schedule.refresh_steps))
        if self.plan.mode != "cached":
            return levels_of(settings, measured, "dense", steps)
        times = self.work.without_schedule().cached_flops / self.work.cached_flops
        return with_template(levels_of(settings, measured, "cached", steps), times)

    def step_down(
        self, level: ReuseLevel, schedule: RefreshSchedule | None, adapter: Adapter
    ) -> None:
        """Apply a reuse level; called before the row is made, since its tokens and steps depend on
        it. A hit then needs the plan of its new steps (`ExecutionPolicy.at_level`).

        Args:
            level: one of `levels`.
            schedule: schedule of the level (`RefreshSchedules.at_level`).
            adapter: the model.
        """
        self.level = level
        if schedule is not None:
            plan = replace(self.plan, schedule=schedule, dense_steps=len(schedule.refresh_steps))
            self.set_plan(plan, adapter)
            return
        changes = {"step_interval": level.step_interval}
        if level.ring is not None:
            changes["mask_ring"] = level.ring
        self.job = adapter.with_settings(self.job, **changes)
        self.work, self.row_status = self.work.recounted(self.job, adapter), None


@dataclass(slots=True, eq=False)
class Priming:
    """A template being primed: its ticket and the progress of its row."""

    job: EditJob
    """Job of an edit, or of a registration, whose encodings are used."""
    key: str
    """Key of the template's entries."""
    anchors: tuple[Anchor, ...]
    """Anchor of each step."""
    ticket: Ticket
    totals: Totals
    """Totals of one step."""
    running: bool = False
    done: int = 0
    """Steps taken."""
    seconds: float = 0.0
    """Seconds of its steps so far."""

    @property
    def request_id(self) -> str:
        return self.ticket.request_id

    @property
    def template_id(self) -> str:
        return self.job.request.template_id

    def note(self) -> Note:
        """Return the note stored beside the entry of the step just taken."""
        whole_s = self.seconds / self.done * len(self.anchors)
        return Note(self.template_id, len(self.anchors), whole_s)

    def totals_of(self, step: RowStep) -> Totals | None:
        """Return the totals of the step just taken; None: it computed its references."""
        is_still = self.anchors[step.done - 1] == STILL
        return None if is_still or step.computed_references else self.totals

    @property
    def step_tokens(self) -> int:
        """Tokens that one of its steps computes: those of the whole template."""
        return self.ticket.total_tokens

    def status(self) -> RowStatus:
        return RowStatus(
            request_id=self.request_id,
            kind="prime",
            active_tokens=self.step_tokens,
            total_tokens=self.step_tokens,
            steps_left=self.ticket.steps - self.done,
            template_id=self.template_id,
        )


StepSeconds = Callable[[RequestState], tuple[tuple[float, ...], float]]
"""Returns an edit's seconds of a step by the number of devices, and the part of each that a step
costs whatever its rows.
"""


class RequestTable:
    """Edits by id.

    Args:
        scheduler: queue of the edits that need a row.
        resource_states: resources of the worker, and the edits that wait for them.
        step_seconds: predicts an edit's seconds per step for its ticket.
    """

    def __init__(
        self,
        scheduler: SchedulingPolicy,
        resource_states: ResourceStates,
        step_seconds: StepSeconds,
    ) -> None:
        self.scheduler, self.resource_states = scheduler, resource_states
        self._step_seconds = step_seconds
        self.edits: dict[str, RequestState] = {}

    def running(self) -> list[RequestState]:
        return self._of(self.scheduler.running)

    def waiting(self) -> list[RequestState]:
        return self._of(self.scheduler.waiting)

    def queue(self, edit: RequestState) -> None:
        """Queue an edit for a row.

        Raises:
            MaskserveError: another edit has its id, or the queue is full.
        """
        self._check_id(edit)
        edit.seconds, edit.shared = self._step_seconds(edit)
        self.scheduler.submit(edit.make_ticket())
        edit.times.queued = time.monotonic()
        self.edits[edit.request_id] = edit

    def reprice(self, edit: RequestState, fewer: int = 0) -> None:
        """Tell the scheduler the work that is left of a running edit, which takes `fewer` steps
        less than it was queued with.
        """
        edit.seconds, edit.shared = self._step_seconds(edit)
        self.scheduler.reprice(edit.make_ticket(), fewer)

    def wait(self, edit: RequestState, resources: Sequence[Resource]) -> None:
        """Let an edit wait until these resources are ready.

        Raises:
            MaskserveError: another edit has its id, or no more edits may wait.
        """
        if not edit.running:
            self._check_id(edit)
        self.resource_states.wait(edit.request_id, resources)
        edit.waited = edit.waiting = True
        edit.waiting_since = time.monotonic()
        self.edits[edit.request_id] = edit

    def _of(self, tickets: Sequence[Ticket]) -> list[RequestState]:
        return [self.edits[t.request_id] for t in tickets if t.request_id in self.edits]

    def _check_id(self, edit: RequestState) -> None:
        if edit.request_id in self.edits:
            raise id_in_use(edit.request_id)
