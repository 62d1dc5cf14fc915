"""SIGINT and SIGTERM as a request to stop, which the main thread waits for."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM)
_LOOK_S = 0.1


class StopSignals:
    """From its making on the two signals ask to stop; made in the main thread.

    Not a threading.Event: a handler runs between any two instructions of the main thread, also
    while that is inside `wait` and holds the event's lock, for which `set` would then
    wait for good. And a signal that comes just before a thread falls asleep does not wake it. So
    the handler takes no lock, and the wait looks again and again.

    Args:
        at_once: called in the handler when a further signal comes; it must not wait.
    """

    def __init__(self, at_once: Callable[[], None] = lambda: None) -> None:
        self._at_once = at_once
        self._asked = False
        for number in _NUMBERS:
            signal.signal(number, self._on_signal)

    def is_set(self) -> bool:
        return self._asked

    def wait(self, limit_s: float = float("inf")) -> bool:
        """Wait until a signal has come, or for so long; whether one has."""
        end = time.monotonic() + limit_s
        while not self._asked and (remaining_s := end - time.monotonic()) > 0:
            time.sleep(min(_LOOK_S, remaining_s))
        return self._asked

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            self._at_once()
        self._asked = True
