"""Rows that run before their LoRAs are loaded (`adapters: fast`).

Used by the engine thread only.
"""

from __future__ import annotations

from dataclasses import replace

from maskserve_common.resources.loading import Loadable
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.requests.edit_adapters import EditAdapters
from maskserve_engine.requests.execution_policy import ExecutionPolicy
from maskserve_engine.requests.executor import Executor
from maskserve_engine.requests.state import RequestState
from maskserve_engine.requests.templates import ExecutionPlan


class LateRows:
    """Rows whose LoRAs are not loaded yet.

    Args:
        policy: policy of a worker with a cache; None: all edits run dense.
    """

    def __init__(
        self,
        adapters: EditAdapters,
        policy: ExecutionPolicy | None,
        executor: Executor,
        adapter: Adapter,
    ) -> None:
        self._adapters, self._policy, self._executor = adapters, policy, executor
        self._adapter = adapter
        self.rows: dict[str, RequestState] = {}
        """Rows by request id."""

    def add(self, edit: RequestState) -> None:
        edit.loras.late = True
        self.rows[edit.request_id] = edit

    def leave(self, request_id: str) -> None:
        self.rows.pop(request_id, None)

    def overdue(self) -> list[RequestState]:
        """Return the rows whose next step needs their LoRAs."""
        return [e for e in self.rows.values() if e.tally.done >= e.loras.without]

    def waiting_for(self, item: Loadable) -> list[RequestState]:
        """Return the rows that wait for this LoRA."""
        return [edit for edit in self.rows.values() if item in edit.loras.effective]

    def attach(self, edit: RequestState) -> None:
        """Give a running row its loaded LoRAs, and their entries, from its next step on."""
        self._adapters.name(edit)
        edit.loras.from_step, edit.loras.late = edit.tally.done, False
        self.leave(edit.request_id)
        self._adapters.attach(edit.request_id, edit.loras.effective)
        edit.go(self._plan(edit), self._adapter)

    def _plan(self, edit: RequestState) -> ExecutionPlan:
        """Return a plan that reads entries made with the row's LoRAs, if it reads entries and these
        exist; otherwise its present plan.
        """
        if edit.plan.outcome != "hit" or not edit.job.adapters or self._policy is None:
            return edit.plan  # its next refresh step computes with them
        adapter_plan = self._policy.choose_with_adapters(edit)
        if adapter_plan is None:
            return edit.plan  # it continues with the base model's entries
        self._executor.read(edit.request_id, adapter_plan.key, adapter_plan.anchors)
        assert edit.reads is not None
        edit.reads = edit.reads.of_entries(adapter_plan.key, adapter_plan.anchors)
        return replace(adapter_plan, schedule_with_template=edit.plan.schedule_with_template)
