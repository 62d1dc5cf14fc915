"""Whether edits pass through the pipeline, as a front sees it.

Triton reports that it is healthy while it loses requests, and no process need have died. A stuck
pipeline and a slow one differ in one way: in a stuck one, no edit that waits for the same part
passes. An edit in the engine waits for no such part, however long it runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

from maskserve_common.contracts.parameters import parameters
from maskserve_common.errors import EngineFailed
from maskserve_common.liveness import Silence
from maskserve_triton.call import Call

PROBE = "maskserve_probe"
"""Parameter of a request that is no edit: its front answers after it has checked its edits."""


def is_probe(request: Any) -> bool:
    """Whether a Triton request only asks its front whether edits come through."""
    return PROBE in parameters(request)


class Passage:
    """A part of the pipeline. It is stuck when edits are in it and, for long, none leaves it.

    Only time in which the watcher was awake counts.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._silence = Silence(clock)
        self._exits = 0

    def record_exit(self) -> None:
        """Record that an edit has come through; for any thread."""
        self._exits += 1

    def stuck_s(self, *, entered: bool) -> float:
        """Return the seconds since an edit last left while edits were inside; must be called again
        and again. `entered`: whether any edit is inside now.
        """
        if not entered:
            self._exits += 1
        return self._silence.silent_s(self._exits)


class Traffic:
    """The edits of one front before and behind the engine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests, self._responses = Passage(clock), Passage(clock)

    def record_arrival(self) -> None:
        """Record that the engine has a further edit."""
        self._requests.record_exit()

    def record_event(self) -> None:
        """Record that an event has come back."""
        self._responses.record_exit()

    def record_end(self) -> None:
        """Record that an edit has left the pipeline, from any part of it."""
        self._requests.record_exit()
        self._responses.record_exit()

    def stuck(
        self, calls: Collection[Call], in_engine: Collection[str], limit_s: float
    ) -> EngineFailed | None:
        """Return an error if calls are stuck; call it repeatedly.

        Args:
            calls: calls in the pipeline, answered or not.
            in_engine: ids of the edits in the engine.
            limit_s: seconds after which a call counts as stuck.
        """
        is_inbound = any(call.sent and not call.last_event for call in calls)
        # A single lost edit is no stuck pipeline: edits behind it leave, and the watcher answers
        # its client.
        is_outbound = any(
            call.last_event and not call.answer.done and call.request_id not in in_engine
            for call in calls
        )
        inbound_s = self._requests.stuck_s(entered=is_inbound)
        outbound_s = self._responses.stuck_s(entered=is_outbound)
        if inbound_s > limit_s:
            return EngineFailed(f"edits are stuck before the engine, for {inbound_s:.1f} s")
        if outbound_s > limit_s:
            return EngineFailed(f"edits are stuck behind the engine, for {outbound_s:.1f} s")
        return None
