"""SIGINT and SIGTERM as a request to stop, which the main thread waits for."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM)
_POLL_S = 0.1


class StopSignals:
    """Handles the two signals from its creation, which must be in the main thread.

    It is not a threading.Event. A handler runs between any two instructions of the main thread,
    also inside `wait` while that holds the event's lock; `set` would then wait for ever. A signal
    just before a thread sleeps does not wake it either. So the handler takes no lock, and `wait`
    polls.

    Args:
        at_once: called in the handler at a further signal; it must not wait.
    """

    def __init__(self, at_once: Callable[[], None] = lambda: None) -> None:
        self._at_once = at_once
        self._received = False
        for number in _NUMBERS:
            signal.signal(number, self._on_signal)

    def is_set(self) -> bool:
        return self._received

    def wait(self, limit_s: float = float("inf")) -> bool:
        """Wait for a signal, at most `limit_s`. Return True if one has come."""
        end = time.monotonic() + limit_s
        while not self._received and (remaining_s := end - time.monotonic()) > 0:
            time.sleep(min(_POLL_S, remaining_s))
        return self._received

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._received:
            self._at_once()
        self._received = True
