"""Pauses of keys whose jobs found no room: one job tries at a time, less and less often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_LONGEST_S: Final = 30.0


@dataclass(slots=True)
class _Pause:
    until: float
    seconds: float
    trying: str | None = None
    """Id of the job that tries whether there is room."""


class Pauses:
    """Pauses by key, in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._pauses: dict[str, _Pause] = {}

    def may_begin(self, scope: str, now: float) -> bool:
        """Return True if a job of the key may begin."""
        pause = self._pauses.get(scope)
        return pause is None or (now >= pause.until and pause.trying is None)

    def record_begin(self, scope: str, job: str) -> None:
        """Record that a job of the key begins."""
        if (pause := self._pauses.get(scope)) is not None:
            pause.trying = job

    def record_refusal(self, scope: str, now: float, least_s: float) -> None:
        """Record a job that found no room; one tries after `least_s` or twice the last pause."""
        pause = self._pauses.get(scope)
        if pause is None:
            self._pauses[scope] = _Pause(now + least_s, least_s)
        elif now >= pause.until:  # jobs that began together are refused together
            pause.seconds = max(min(2 * pause.seconds, _LONGEST_S), least_s)
            pause.until = now + pause.seconds

    def record_end(self, scope: str, job: str) -> None:
        """Record that a job has ended; if it was the one that tried, another may try."""
        pause = self._pauses.get(scope)
        if pause is not None and pause.trying == job:
            pause.trying = None

    def lift(self, scope: str) -> None:
        """End the pause: a job of the key found room."""
        self._pauses.pop(scope, None)
