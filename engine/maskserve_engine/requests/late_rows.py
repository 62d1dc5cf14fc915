"""Rows that run before their LoRAs are here (`adapters: fast`).

Used by the engine thread only.
"""

from __future__ import annotations

from maskserve_core.worker.loading import Loadable
from maskserve_engine.requests.edit_adapters import EditAdapters
from maskserve_engine.requests.executor import Executor
from maskserve_engine.requests.state import RequestState
from maskserve_engine.requests.ways import Ways


class LateRows:
    """Those rows, and how they get their LoRAs.

    Args:
        adapters: of the edits.
        ways: of a worker with a cache; None: all edits run dense.
        executor: of the rows.
    """

    def __init__(self, adapters: EditAdapters, ways: Ways | None, executor: Executor) -> None:
        self._adapters, self._ways, self._executor = adapters, ways, executor
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
        if edit.route.outcome != "hit" or not edit.job.adapters or self._ways is None:
            return  # anchors of its own have them from the next one on
        own = self._ways.when_adapters_came(edit.job)
        if own is not None:  # else it goes on with those of the base model
            edit.route = own
            self._executor.read(edit.request_id, own.key, own.anchors)
            assert edit.reads is not None
            edit.reads = edit.reads.of_entries(own.key, own.anchors)
