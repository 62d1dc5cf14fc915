"""The engine's books: every edit that has not ended, in the queue, in a row, or waiting.

Used by the engine thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from maskserve_common.contracts.keys import name_of
from maskserve_common.errors import InvalidRequest
from maskserve_common.resources.residency import Residency, Resource
from maskserve_engine.requests.state import RequestState
from maskserve_engine.scheduling.step_scheduler import SchedulingPolicy, Ticket

StepSeconds = Callable[[RequestState], tuple[tuple[float, ...], float]]
"""Of an edit: seconds of a step by the number of devices, and what of each a step costs whatever
its rows.
"""


class Books:
    """Edits by id.

    Args:
        scheduler: decides whose turn it is.
        residency: knows what edits wait for.
        step_seconds: what tickets say of an edit's steps.
    """

    def __init__(
        self, scheduler: SchedulingPolicy, residency: Residency, step_seconds: StepSeconds
    ) -> None:
        self.scheduler, self.residency = scheduler, residency
        self._step_seconds = step_seconds
        self.edits: dict[str, RequestState] = {}

    def running(self) -> list[RequestState]:
        """Edits that the scheduler has admitted."""
        return self._of(self.scheduler.running)

    def waiting(self) -> list[RequestState]:
        """Edits that are queued."""
        return self._of(self.scheduler.waiting)

    def queue(self, edit: RequestState) -> None:
        """Have it take its turn.

        Raises:
            MaskserveError: another edit has its id, or the queue is full.
        """
        self._check_id(edit)
        edit.seconds, edit.shared = self._step_seconds(edit)
        self.scheduler.submit(edit.make_ticket())
        edit.times.queued = time.monotonic()
        self.edits[edit.request_id] = edit

    def wait(self, edit: RequestState, resources: Sequence[Resource]) -> None:
        """Have it wait until these are here.

        Raises:
            MaskserveError: another edit has its id, or no more edits may wait.
        """
        if not edit.running:
            self._check_id(edit)
        self.residency.wait(edit.request_id, resources)
        edit.waited = edit.waiting = True
        edit.stopped = time.monotonic()
        self.edits[edit.request_id] = edit

    def _of(self, tickets: Sequence[Ticket]) -> list[RequestState]:
        return [self.edits[t.request_id] for t in tickets if t.request_id in self.edits]

    def _check_id(self, edit: RequestState) -> None:
        if edit.request_id in self.edits:
            raise InvalidRequest(
                "SETTINGS.request_id",
                f"{name_of(edit.request_id)!r} is still being served",
                "a new id",
            )
