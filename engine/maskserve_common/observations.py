"""Measured values, queued for the thread that publishes them.

Publishing a value on Triton's /metrics takes tens of microseconds and sometimes milliseconds, too
long for a step. Queueing one takes a fraction of a microsecond.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

Observation = tuple[str, float, tuple[str, ...]]
"""Metric (without prefix), value in the metric's unit, values of its labels."""

_CAPACITY = 8192


class Observations:
    """A bounded queue without locks: `append` and `popleft` of a deque are atomic.

    If nobody reads it, further values are dropped and counted.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self.dropped = 0
        self._capacity = capacity
        self._queue: deque[Observation] = deque()

    def add(self, metric: str, value: float = 1.0, *labels: str) -> None:
        """Add an observation, from any thread; several threads may exceed the capacity by one
        each.
        """
        if len(self._queue) < self._capacity:
            self._queue.append((metric, value, labels))
        else:
            self.dropped += 1

    def take(self) -> Iterator[Observation]:
        """Remove and yield the observations so far, oldest first; for one thread."""
        for _ in range(len(self._queue)):
            yield self._queue.popleft()
