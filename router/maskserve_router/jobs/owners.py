"""Detection of lost routers: their heartbeats stop."""

from __future__ import annotations

from collections.abc import Mapping


class Owners:
    """Watches the heartbeats of other routers by this router's own clock.

    Time in which this router did not look does not count, because it was stopped or had no
    database and saw no heartbeats.

    Args:
        name: name of this router, which is never among the lost ones.
        silence_s: seconds without a heartbeat after which a router is lost.
    """

    def __init__(self, name: str, silence_s: float) -> None:
        self._name, self._silence_s = name, silence_s
        self._last: float | None = None
        self._watched_s = 0.0
        self._beats: dict[str, tuple[int, float]] = {}
        """Owner -> its last heartbeat, and the value of `_watched_s` when that was new."""

    def find_lost(self, beats: Mapping[str, int], now: float) -> list[tuple[str, int]]:
        """Return the lost owners with their last heartbeats.

        Args:
            beats: present heartbeats of all owners.
            now: seconds of a monotonic clock.
        """
        elapsed_s = 0.0 if self._last is None else now - self._last
        self._watched_s += min(elapsed_s, self._silence_s / 4)
        self._last = now
        self._beats = {
            owner: last_beat
            if (last_beat := self._beats.get(owner)) is not None and last_beat[0] == beat
            else (beat, self._watched_s)
            for owner, beat in beats.items()
            if owner != self._name
        }
        return [
            (owner, beat)
            for owner, (beat, since) in self._beats.items()
            if self._watched_s - since >= self._silence_s
        ]
