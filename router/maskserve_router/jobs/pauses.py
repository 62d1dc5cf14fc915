"""When jobs of a key are tried for which there was no room: one at a time, more and more rarely."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_LONGEST_S: Final = 30.0


@dataclass(slots=True)
class _Pause:
    until: float
    seconds: float
    trying: str | None = None
    """The job that tries whether there is room."""


class Pauses:
    """Pauses of keys, in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._pauses: dict[str, _Pause] = {}

    def may(self, scope: str, now: float) -> bool:
        """Whether a job of the key may be begun."""
        pause = self._pauses.get(scope)
        return pause is None or (now >= pause.until and pause.trying is None)

    def began(self, scope: str, job: str) -> None:
        """A job of the key is begun."""
        if (pause := self._pauses.get(scope)) is not None:
            pause.trying = job

    def refused(self, scope: str, now: float, least_s: float) -> None:
        """There was no room for one; the next tries after `least_s`, or twice the last pause."""
        pause = self._pauses.get(scope)
        if pause is None:
            self._pauses[scope] = _Pause(now + least_s, least_s)
        elif now >= pause.until:  # those that were begun together are refused together
            pause.seconds = max(min(2 * pause.seconds, _LONGEST_S), least_s)
            pause.until = now + pause.seconds

    def ended(self, scope: str, job: str) -> None:
        """A job is over, whatever became of it: if it was the one that tried, another may."""
        pause = self._pauses.get(scope)
        if pause is not None and pause.trying == job:
            pause.trying = None

    def went(self, scope: str) -> None:
        """There was room for a job of the key."""
        self._pauses.pop(scope, None)
