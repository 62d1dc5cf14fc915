"""Admission checks: the conditions that an edit meets before it is queued.

A check lets an edit pass, names the resources that it waits for, or refuses it. Checks run in
order; after a wait an edit starts again at the first check.

Used by the engine thread only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from maskserve_common.errors import EngineFailed, Overloaded
from maskserve_common.resources.residency import Resource
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.requests.due_times import InTime
from maskserve_engine.requests.edit_adapters import EditAdapters
from maskserve_engine.requests.execution_policy import ExecutionPolicy
from maskserve_engine.requests.primings import Primings
from maskserve_engine.requests.request_table import RequestTable
from maskserve_engine.requests.state import RequestState
from maskserve_engine.requests.templates import DENSE

TEMPLATE = "template"
"""The kind of resource."""
_STARTS_MOST = 5
"""Most plans chosen for one edit: its template may be evicted again before it has a row."""


class AdmissionCheck(Protocol):
    def missing(self, edit: RequestState) -> Sequence[Resource]:
        """Return the resources that the edit has to wait for; empty: it passes.

        Raises:
            MaskserveError: the edit is refused.
        """
        ...


class AdaptersLoaded:
    """Requires the edit's ControlNets and LoRAs on the device; they are loaded at the same time.
    With `adapters: fast` it may begin without its LoRAs, but at most as many such edits as the
    batch has rows.
    """

    def __init__(self, adapters: EditAdapters, table: RequestTable, most_without: int) -> None:
        self._adapters, self._table, self._most_without = adapters, table, most_without

    def missing(self, edit: RequestState) -> Sequence[Resource]:
        nets, loras = self._adapters.absent_nets(edit), self._adapters.absent_loras(edit)
        if nets or (loras and not self._may_begin_without(edit)):
            return (*nets, *loras)
        if not loras:
            self._adapters.name(edit)
        return ()

    def _may_begin_without(self, edit: RequestState) -> bool:
        if not self._adapters.may_begin_without(edit):
            return False
        return (
            sum(running_edit.loras.late for running_edit in self._table.edits.values())
            < self._most_without
        )


class PlanChosen:
    """Chooses the edit's execution plan.

    Args:
        policy: policy of a worker with a cache; None: all edits run dense.
    """

    def __init__(self, policy: ExecutionPolicy | None, adapter: Adapter) -> None:
        self._policy, self._adapter = policy, adapter

    def missing(self, edit: RequestState) -> Sequence[Resource]:
        if edit.starts == _STARTS_MOST:
            raise Overloaded(
                f"the edit's template was lost {edit.starts} times before the edit could begin "
                "(the cache may be too small for the templates in use); try again later"
            )
        edit.go(DENSE if self._policy is None else self._policy.choose(edit), self._adapter)
        edit.starts += 1
        return ()


class DoneInTime:
    """Refuses an edit that would miss its due time; checks each edit once."""

    def __init__(self, in_time: InTime, table: RequestTable) -> None:
        self._in_time, self._table = in_time, table

    def missing(self, edit: RequestState) -> Sequence[Resource]:
        if edit.starts == 1 and edit.deadline is not None:
            running, waiting = self._table.running(), self._table.waiting()
            self._in_time.check(edit, running, waiting, time.monotonic())
        return ()


class TemplateReady:
    """Waits for the template of an edit whose plan requires it, and starts priming."""

    def __init__(self, primings: Primings, policy: ExecutionPolicy, adapter: Adapter) -> None:
        self._cache, self._primings, self._policy = primings.cache, primings, policy
        self._adapter = adapter

    def missing(self, edit: RequestState) -> Sequence[Resource]:
        route, waits = edit.plan, edit.plan.mode == "wait"
        if route.prime:
            due_at = edit.make_ticket().due if waits else None
            self._primings.begin(edit.job, urgent=waits, due=due_at)
        if not waits:
            return ()
        # The load may have ended on another thread, whose message is not read yet.
        if route.is_loading or self._cache.is_loading(route.key):
            return (Resource(TEMPLATE, route.key),)
        settings = edit.job.request.settings
        if settings.insists:
            requirement = (
                "cache is require" if settings.cache == "require" else "reproducible is set"
            )
            raise EngineFailed(
                f"SETTINGS.{requirement}, but the template could not be primed (it does not "
                "fit the "
                "cache's budget, or the worker is short of memory); with cache: off the edit needs "
                "no template"
            )
        missed = replace(DENSE, outcome="miss", key=route.key)
        edit.go(self._policy.without_template(edit, missed), self._adapter)
        return ()
