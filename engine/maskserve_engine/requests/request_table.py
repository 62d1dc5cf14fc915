"""The request table: every edit that has not ended, in the queue, in a row, or waiting.

Used by the engine thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from maskserve_common.resources.residency import Residency, Resource
from maskserve_engine.requests.state import RequestState
from maskserve_engine.scheduling.step_scheduler import SchedulingPolicy, Ticket, id_in_use

StepSeconds = Callable[[RequestState], tuple[tuple[float, ...], float]]
"""Returns an edit's seconds of a step by the number of devices, and the part of each that a step
costs whatever its rows.
"""


class RequestTable:
    """Edits by id.

    Args:
        scheduler: queue of the edits that need a row.
        residency: resources of the worker, and the edits that wait for them.
        step_seconds: predicts an edit's seconds per step for its ticket.
    """

    def __init__(
        self, scheduler: SchedulingPolicy, residency: Residency, step_seconds: StepSeconds
    ) -> None:
        self.scheduler, self.residency = scheduler, residency
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

    def reprice(self, edit: RequestState) -> None:
        """Tell the scheduler the work that is left of a running edit."""
        edit.seconds, edit.shared = self._step_seconds(edit)
        self.scheduler.reprice(edit.make_ticket())

    def wait(self, edit: RequestState, resources: Sequence[Resource]) -> None:
        """Let an edit wait until these resources are ready.

        Raises:
            MaskserveError: another edit has its id, or no more edits may wait.
        """
        if not edit.running:
            self._check_id(edit)
        self.residency.wait(edit.request_id, resources)
        edit.waited = edit.waiting = True
        edit.waiting_since = time.monotonic()
        self.edits[edit.request_id] = edit

    def _of(self, tickets: Sequence[Ticket]) -> list[RequestState]:
        return [self.edits[t.request_id] for t in tickets if t.request_id in self.edits]

    def _check_id(self, edit: RequestState) -> None:
        if edit.request_id in self.edits:
            raise id_in_use(edit.request_id)
