"""Flow control: the next event of a request goes out when the last one was taken."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from maskserve_core.triton.answer import Answer

_FINAL = "final"


class FlowControl:
    """Sends an event once the last one was taken; what is newer then replaces what still waits.

    TRITON-2.51: so a call never has two responses under way (acks.py). Where the way is slower than
    the steps, the newest events are shown instead of a queue of old ones. The final event replaces
    all that waits; the end of the responses comes after it, apart, when it was taken too.

    Args:
        answer: of the request.
        ended: called once, when the request has ended.
    """

    def __init__(self, answer: Answer, ended: Callable[[], None]) -> None:
        self._answer, self._ended = answer, ended
        self._lock = threading.Lock()
        self._waiting: dict[str, dict[str, Any]] = {}
        """Kind of event -> the newest of it, in the order in which they go."""
        self._under_way = False
        self._sealed = False
        """The final event was given; nothing more is taken."""
        self._released = False
        self._over = False
        self._sent = time.monotonic()
        """When the newest event was."""

    def event(self, kind: str, outputs: dict[str, Any]) -> None:
        """Send an event that others follow, now or later or, if a newer one comes, never."""
        self._put(kind, outputs)

    def finish(self, outputs: dict[str, Any]) -> None:
        """Send the final event; later ones are dropped."""
        self._put(_FINAL, outputs)

    def taken(self) -> None:
        """The event under way has arrived: send the next."""
        with self._lock:
            self._under_way = False
        self._go_on()

    def waits_s(self) -> float:
        """Seconds for which the event under way has not been taken; 0 if there is none."""
        with self._lock:
            waits = self._under_way and not self._released
            return time.monotonic() - self._sent if waits else 0.0

    def release(self) -> None:
        """Nobody takes events any more: from now on none waits, so that the request ends."""
        with self._lock:
            self._released = True
        self._go_on()

    def _put(self, kind: str, outputs: dict[str, Any]) -> None:
        with self._lock:
            if self._sealed:
                return
            if kind == _FINAL:
                self._sealed = True
                self._waiting.clear()
            self._waiting.pop(kind, None)
            self._waiting[kind] = outputs
        self._go_on()

    def _go_on(self) -> None:
        """Send what may go: one event or, when it was released, all; and then the end."""
        while (event := self._next()) is not None:
            self._answer.event(*event)
        with self._lock:
            ends = self._sealed and not self._over and not self._holds()
            self._over = self._over or ends
        if ends:
            self._answer.end()
            self._ended()

    def _next(self) -> tuple[str, dict[str, Any]] | None:
        with self._lock:
            if not self._waiting or (self._under_way and not self._released):
                return None
            self._under_way, self._sent = True, time.monotonic()
            kind = next(iter(self._waiting))
            return kind, self._waiting.pop(kind)

    def _holds(self) -> bool:
        return bool(self._waiting) or (self._under_way and not self._released)
