"""Admission checks: the conditions that an edit meets before it is queued.

Used by the engine thread only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from maskserve_common.errors import EngineFailed, Overloaded
from maskserve_common.resources.resource_states import Resource
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.requests.due_times import DueTimes
from maskserve_engine.requests.edit_adapters import EditAdapters
from maskserve_engine.requests.execution_plan import DENSE
from maskserve_engine.requests.execution_policy import ExecutionPolicy
from maskserve_engine.requests.primings import Primings
from maskserve_engine.requests.state import RequestState, RequestTable

TEMPLATE = "template"
"""The kind of resource."""
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
        missed = replace(DENSE, outcome="miss", key=plan.key)
        edit.set_plan(self._policy.without_template(edit, missed), self._adapter)
        return ()
