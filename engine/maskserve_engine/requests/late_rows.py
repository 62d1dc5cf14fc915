"""Rows that run before their LoRAs are here (`adapters: fast`).

Used by the engine thread only.
"""

from __future__ import annotations

from dataclasses import replace

from maskserve_common.resources.loading import Loadable
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.requests.edit_adapters import EditAdapters
from maskserve_engine.requests.executor import Executor
from maskserve_engine.requests.state import RequestState
from maskserve_engine.requests.templates import Route
from maskserve_engine.requests.ways import Ways


class LateRows:
    """Those rows, and how they get their LoRAs.

    Args:
        adapters: of the edits.
        ways: of a worker with a cache; None: all edits run dense.
        executor: of the rows.
        adapter: the model.
    """

    def __init__(
        self, adapters: EditAdapters, ways: Ways | None, executor: Executor, adapter: Adapter
    ) -> None:
        self._adapters, self._ways, self._executor = adapters, ways, executor
        self._adapter = adapter
        self.rows: dict[str, RequestState] = {}
        """By request id."""

    def add(self, edit: RequestState) -> None:
        edit.loras.late = True
        self.rows[edit.request_id] = edit

    def leave(self, request_id: str) -> None:
        self.rows.pop(request_id, None)

    def overdue(self) -> list[RequestState]:
        """Those whose next step needs their LoRAs."""
        return [e for e in self.rows.values() if e.tally.done >= e.loras.without]

    def waiting_for(self, wanted: Loadable) -> list[RequestState]:
        """Those that one of their LoRAs is brought for."""
        return [edit for edit in self.rows.values() if wanted in edit.loras.wanted]

    def attach(self, edit: RequestState) -> None:
        """LoRAs have come while the row ran: its next steps have them, and their entries."""
        self._adapters.name(edit)
        edit.loras.from_step, edit.loras.late = edit.tally.done, False
        self.leave(edit.request_id)
        self._adapters.attach(edit.request_id, edit.loras.wanted)
        edit.go(self._route(edit), self._adapter)

    def _route(self, edit: RequestState) -> Route:
        """By its template's entries that know its LoRAs, if it reads any and there are such."""
        if edit.route.outcome != "hit" or not edit.job.adapters or self._ways is None:
            return edit.route  # anchors of its own have them from the next one on
        adapter_plan = self._ways.when_adapters_came(edit)
        if adapter_plan is None:
            return edit.route  # it goes on with those of the base model
        self._executor.read(edit.request_id, adapter_plan.key, adapter_plan.anchors)
        assert edit.reads is not None
        edit.reads = edit.reads.of_entries(adapter_plan.key, adapter_plan.anchors)
        return replace(adapter_plan, beside=edit.route.beside)
