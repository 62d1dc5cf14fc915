"""Admission: the checks that an edit meets before it is queued, and the execution policy.

The policy is the one place that chooses how an edit runs: from its template's entries, with refresh
steps, dense, or after its template's priming.

Used by the engine thread only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from maskserve_common.contracts.reuse_levels import ReuseLevel
from maskserve_common.errors import EngineFailed, Overloaded
from maskserve_common.resources.resource_states import Resource
from maskserve_engine.base.job import EditJob
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.planning.regions import RegionRule
from maskserve_engine.requests.audits import Audits
from maskserve_engine.requests.due_times import DueTimes
from maskserve_engine.requests.edit_adapters import EditAdapters
from maskserve_engine.requests.execution_plan import DENSE, ExecutionMode, ExecutionPlan
from maskserve_engine.requests.primings import Primings
from maskserve_engine.requests.refresh_schedules import RefreshSchedules
from maskserve_engine.requests.state import RequestState, RequestTable
from maskserve_engine.requests.templates import WORTH_PRIMING, CacheLookup

TEMPLATE = "template"
"""Kind of the resources that are templates."""
_MOST_PLANS = 5
"""Most plans chosen for one edit: its template may be evicted again before it has a row."""


class AdmissionChecks:
    """Lets an edit pass, names the resources that it waits for, or refuses it. After a wait an edit
    starts again at the first check.

    Args:
        adapters: LoRAs and ControlNets of the edits.
        most_without_loras: most edits that may begin without their LoRAs (`adapters: fast`).
        due_times: predicts whether edits meet their deadlines.
        primings: primings of templates; None: all edits run dense, and there is no `policy`.
        policy: chooses the execution plans.
    """

    def __init__(
        self,
        adapter: Adapter,
        table: RequestTable,
        adapters: EditAdapters,
        most_without_loras: int,
        due_times: DueTimes,
        primings: Primings | None,
        policy: ExecutionPolicy | None,
    ) -> None:
        self._adapter, self._table, self._due_times = adapter, table, due_times
        self._adapters, self._most_without_loras = adapters, most_without_loras
        self._primings, self._policy = primings, policy

    def missing(self, edit: RequestState) -> Sequence[Resource]:
        """Return the resources that the edit has to wait for; empty: it may be queued.

        Raises:
            MaskserveError: the edit is refused.
        """
        adapters = self._missing_adapters(edit)
        if adapters:
            return adapters
        self._choose_plan(edit)
        self._check_deadline(edit)
        return self._missing_template(edit)

    def _missing_adapters(self, edit: RequestState) -> Sequence[Resource]:
        """Return the edit's ControlNets and LoRAs that are not on the device; they are loaded at
        the same time. With `adapters: fast` it may begin without its LoRAs.
        """
        nets, loras = self._adapters.absent_nets(edit), self._adapters.absent_loras(edit)
        if nets or (loras and not self._may_begin_without_loras(edit)):
            return (*nets, *loras)
        if not loras:
            self._adapters.use_loras(edit)
        return ()

    def _may_begin_without_loras(self, edit: RequestState) -> bool:
        if not self._adapters.may_begin_without(edit):
            return False
        late_edits = sum(other.loras.late for other in self._table.edits.values())
        return late_edits < self._most_without_loras

    def _choose_plan(self, edit: RequestState) -> None:
        if edit.plans_chosen == _MOST_PLANS:
            raise Overloaded(
                f"the edit's template was lost {_MOST_PLANS} times before the edit could begin "
                "(the cache may be too small for the templates in use); try again later"
            )
        edit.set_plan(DENSE if self._policy is None else self._policy.choose(edit), self._adapter)
        edit.plans_chosen += 1

    def _check_deadline(self, edit: RequestState) -> None:
        """Refuse an edit that would miss its deadline; each edit is checked once."""
        if edit.plans_chosen == 1 and edit.deadline is not None:
            running, waiting = self._table.running(), self._table.waiting()
            self._due_times.check(edit, running, waiting, time.monotonic())

    def _missing_template(self, edit: RequestState) -> Sequence[Resource]:
        """Begin the priming that the edit's plan asks for, and return its template if the plan
        waits for it and it is on its way. If it is not, the edit runs without, or is refused.
        """
        if self._primings is None or self._policy is None:
            return ()
        plan, waits = edit.plan, edit.plan.mode == "wait"
        if plan.prime:
            self._primings.begin(edit.job, urgent=waits, due=edit.due_at if waits else None)
        if not waits:
            return ()
        # The load may have ended on another thread, whose message is not read yet.
        if plan.is_loading or self._primings.cache.is_loading(plan.key):
            return (Resource(TEMPLATE, plan.key),)
        settings = edit.job.request.settings
        if settings.insists:
            requirement = (
                "cache is require" if settings.cache == "require" else "reproducible is set"
            )
            raise EngineFailed(
                f"SETTINGS.{requirement}, but the template could not be primed (it does not fit "
                "the cache's budget, or the worker is short of memory); with cache: off the edit "
                "needs no template"
            )
        miss = replace(DENSE, outcome="miss", key=plan.key)
        edit.set_plan(self._policy.without_template(edit, miss), self._adapter)
        return ()


class ExecutionPolicy:
    """Chooses the execution plans of a worker with a cache.

    Args:
        primings: primings of templates.
        audits: drift of audited templates.
        due_times: predicts when edits are done.
        table: table of the edits.
        schedules: decides refresh steps.
        adapter: the model.
    """

    def __init__(
        self,
        primings: Primings,
        audits: Audits,
        due_times: DueTimes,
        table: RequestTable,
        schedules: RefreshSchedules,
        adapter: Adapter,
    ) -> None:
        self._schedules, self._adapter = schedules, adapter
        self._cache, self._primings, self._audits = primings.cache, primings, audits
        self._due_times, self._table = due_times, table

    def choose(self, edit: RequestState) -> ExecutionPlan:
        """Return the first of these plans that the edit may take:

        - dense: with `cache: off`, without a mask, or a mask above `[cache] dense_above_ratio`;
        - cached: its template is primed, and reading it is no more work than a dense edit;
        - wait: it insists on its template;
        - wait: it would be late without its template, and is in time after the priming;
        - wait: it sees a window of a known picture that is worth priming, and has no due time;
        - cached with refresh steps, if these are less work than a dense edit;
        - dense.

        Only the last two apply with `cache: own`, with `reuse_floor`, if the template has drifted,
        if the mask covers a side (`ModelSpec.dense_sides`), if there are references beside the
        source, and if refresh steps keep more of an edit than a template does
        (`RefreshSpec.over_template`).
        """
        job, settings = edit.job, edit.job.request.settings
        if settings.cache == "off":
            return DENSE
        dense_for = self._cache.dense_for(job)
        if dense_for == job.request.kind:  # an edit without a mask
            return replace(DENSE, dense_for=dense_for, region=self._region(job))
        key = "" if job.references else self._cache.key_of(job)
        drift = self._audits.over_limit(key)
        if drift is not None and not settings.insists:
            edit.drift = drift
            return self.without_template(edit, replace(DENSE, key=key))
        if dense_for:
            dense = replace(DENSE, dense_for=dense_for, key=key)
            return dense if dense_for == "mask_ratio" else self.without_template(edit, dense)
        miss = replace(DENSE, outcome="miss", key=key)
        plan_without, ignores_template = None, settings.cache == "own" or settings.promise > 0
        if ignores_template or self._adapter.spec.refresh.over_template:
            plan_without = self.without_template(edit, miss)
            can_refresh = plan_without.schedule is not None or plan_without.dense_for == "work"
            if ignores_template or can_refresh:
                return plan_without
        lookup = self._cache.look_up(job, key, again=edit.plans_chosen > 0)
        cached = self._plan_with_template(edit, lookup, insists=settings.insists)
        if cached is not None:
            saves_nothing = cached.mode == "dense" and not settings.insists
            return self.without_template(edit, cached) if saves_nothing else cached
        plan_without = plan_without or self.without_template(edit, miss)
        plan_without = replace(plan_without, prime=lookup.worth_priming)
        return self._wait_for_priming(edit, lookup, plan_without) or plan_without

    def _region(self, job: EditJob) -> RegionRule | None:
        """Return how an edit without a mask finds its region; None: it does not ask for one, has
        too few steps, or leaves no room for refresh steps.
        """
        rule, settings = self._adapter.spec.region, job.request.settings
        if rule is None or settings.region == "off" or not settings.may_refresh or job.controls:
            return None
        is_long = self._adapter.steps(job) >= rule.after + 4
        return rule if is_long and self._cache.keeps_kv else None

    def without_template(self, edit: RequestState, dense: ExecutionPlan) -> ExecutionPlan:
        """Return a plan with refresh steps, or `dense` if the edit can have none or if they are as
        much work.
        """
        schedule = self._schedules.of(edit.job)
        if schedule is None or not self._cache.keeps_kv:
            return dense
        dense_steps = len(schedule.refresh_steps)
        refreshed = replace(
            dense,
            mode="cached",
            outcome="own",
            schedule=schedule,
            dense_steps=dense_steps,
            dense_for="",
        )
        return self._least_work(
            edit, replace(dense, dense_for=dense.dense_for or "work"), refreshed
        )

    def _least_work(self, edit: RequestState, *plans: ExecutionPlan) -> ExecutionPlan:
        return min(plans, key=lambda plan: edit.step_flops(plan, self._adapter))

    def at_level(self, edit: RequestState, level: ReuseLevel) -> ExecutionPlan:
        """Return the plan of a hit for the steps and the ring of its reuse level. Levels with
        another ring were measured without a step cache beside the template.
        """
        lookup = self._cache.look_up(edit.job, edit.plan.key, again=True)
        plan = replace(
            edit.plan,
            anchors=lookup.reads,
            dense_steps=lookup.dense_steps,
            schedule_with_template=None,
        )
        return plan if level.ring is not None else self._add_step_cache(edit, plan)

    def choose_with_adapters(self, edit: RequestState) -> ExecutionPlan | None:
        """Return the plan of a cached edit whose LoRAs are ready now: it reads entries made with
        them. None: there are no such entries yet; their priming begins if it is worthwhile.
        """
        job = edit.job
        lookup = self._cache.look_up(job, self._cache.key_of(job))
        plan = self._plan_with_template(edit, lookup, insists=False)
        if plan is None and lookup.worth_priming:
            self._primings.begin(job, urgent=False)
        return None if plan is None or plan.mode == "dense" else plan

    def _add_step_cache(self, edit: RequestState, chosen: ExecutionPlan) -> ExecutionPlan:
        """Return the plan of least work for a hit with a step cache; see
        `RefreshSchedules.beside_template`.
        """
        if not self._cache.keeps_kv:
            return chosen
        schedules = self._schedules.beside_template(edit.job, chosen.dense_steps)
        plans = (replace(chosen, schedule_with_template=schedule) for schedule in schedules)
        return self._least_work(edit, *plans)

    def _plan_with_template(
        self, edit: RequestState, lookup: CacheLookup, *, insists: bool
    ) -> ExecutionPlan | None:
        """Return a plan that reads the template's entries or, if the edit insists on them, waits
        for them; a dense one if they save no work; None: the edit runs without.
        """
        if not any(lookup.reads) or (lookup.tier is None and not insists):
            return None
        plan = ExecutionPlan(
            "cached",
            "hit",
            lookup.key,
            lookup.reads,
            lookup.tier or "",
            dense_steps=lookup.dense_steps,
        )
        plan = self._add_step_cache(edit, plan)
        dense = replace(DENSE, dense_for="work", key=lookup.key)
        if self._least_work(edit, plan, dense) is dense:
            return dense
        if lookup.tier is None:
            return ExecutionPlan(
                "wait", "hit", lookup.key, prime=lookup.may_prime, is_loading=lookup.is_loading
            )
        ready = self._cache.fetch(lookup)
        mode: ExecutionMode = "wait" if insists and not ready else "cached"
        return replace(plan, mode=mode, is_loading=not ready)

    def _wait_for_priming(
        self, edit: RequestState, lookup: CacheLookup, without: ExecutionPlan
    ) -> ExecutionPlan | None:
        """Return a plan that waits for the template's priming, if the edit would be late otherwise
        and in time with it; without a due time, if it sees a window of a known picture that is
        worth priming. None: waiting does not help, or priming is impossible.
        """
        if edit.plans_chosen or edit.loras.absent or not any(lookup.reads):
            return None
        primes = not lookup.priming
        if primes and not lookup.may_prime:
            return None
        anchors_left = len(lookup.anchors) if primes else self._primings.anchors_left(lookup.key)
        if anchors_left is None:
            return None
        plan = ExecutionPlan(
            "wait", "hit", lookup.key, prime=primes, dense_steps=lookup.dense_steps
        )
        if lookup.is_known_picture and edit.due_at is None:
            hit = replace(plan, mode="cached", anchors=lookup.reads)
            worth = self._is_worth_priming(
                edit, without, self._add_step_cache(edit, hit), anchors_left
            )
            return plan if worth else None
        running = self._table.running()
        if self._due_times.gains_by_waiting(edit, without, plan, anchors_left, running):
            return plan
        return None

    def _is_worth_priming(
        self, edit: RequestState, without: ExecutionPlan, hit: ExecutionPlan, anchors: int
    ) -> bool:
        """Whether `WORTH_PRIMING` edits such as this save more work than priming the anchors is."""
        saved = edit.step_flops(without, self._adapter) - edit.step_flops(hit, self._adapter)
        work = edit.work.without_schedule()
        return anchors * work.dense_flops < WORTH_PRIMING * work.steps * saved
