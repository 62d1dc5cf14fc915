"""How a request's events go out: as they come, or one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from maskserve_core.backend.answer import Answer

_FINAL = "final"


class Events(Protocol):
    """Where the events of one request go."""

    def event(self, kind: str, outputs: dict[str, Any]) -> None: ...
    def finish(self, outputs: dict[str, Any]) -> None: ...


class Straight:
    """Sends each event as it comes."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def event(self, kind: str, outputs: dict[str, Any]) -> None:
        self._answer.event(outputs)

    def finish(self, outputs: dict[str, Any]) -> None:
        self._answer.finish(outputs)


class Paced:
    """Sends an event once the last one was taken; what is newer then replaces what still waits.

    So a call never has two responses under way (receipts.py), and a client that is slower than
    the steps sees the newest of them instead of a queue of old ones. The final event replaces all
    that waits; the end of the responses comes after it, apart, when it was taken too.

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

    def event(self, kind: str, outputs: dict[str, Any]) -> None:
        """Send an event that others follow, now or later or, if a newer one comes, never."""
        self._put(kind, outputs)

    def finish(self, outputs: dict[str, Any]) -> None:
        """Send the final event; later ones are dropped."""
        self._put(_FINAL, outputs)

    def taken(self) -> None:
        """The event under way has arrived: send the next."""
        with self._lock:
            if not self._under_way:
                return
            self._under_way = False
            over = self._sealed and not self._waiting
        if over:
            self._answer.end()
            self._ended()
        else:
            self._send()

    def _put(self, kind: str, outputs: dict[str, Any]) -> None:
        with self._lock:
            if self._sealed:
                return
            if kind == _FINAL:
                self._sealed = True
                self._waiting.clear()
            self._waiting.pop(kind, None)
            self._waiting[kind] = outputs
        self._send()

    def _send(self) -> None:
        with self._lock:
            if self._under_way or not self._waiting:
                return
            kind = next(iter(self._waiting))
            outputs = self._waiting.pop(kind)
            self._under_way = True
        self._answer.event(outputs)
