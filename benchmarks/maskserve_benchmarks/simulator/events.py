"""Virtual time: a clock that jumps from event to event."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Events:
    """Future events, by time and then by the order of their entry."""

    def __init__(self) -> None:
        self.now = 0.0
        self._pending: list[tuple[float, int, Callable[..., None], object]] = []
        self._number = 0

    def at(self, when: float, method: Callable[..., None], argument: object) -> None:
        """Schedule a call of `method(when, argument)`."""
        heapq.heappush(self._pending, (when, self._number, method, argument))
        self._number += 1

    def run(self) -> None:
        """Run until no event is left."""
        while self._pending:
            when, _, method, argument = heapq.heappop(self._pending)
            if when < self.now:
                raise RuntimeError(f"an event of {when} at {self.now}")
            self.now = when
            method(when, argument)
