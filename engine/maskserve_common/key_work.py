"""Recent work of each key, which decides where keys share time and not places."""

from __future__ import annotations

from collections.abc import Iterable

_HEAVY = 1e30
_MEMORY = 64
"""Steps after which about a third of a key's work still counts."""


class KeyWork:
    """Recent work of each key; the key with least lags. Keys that send requests only occasionally
    are served before busy keys. Earlier work decays, so a busy key never waits long, and two busy
    keys share equally.
    """

    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        self._weight = 1.0
        """Weight of work that is added now. It grows, so that earlier work counts less."""

    def add(self, key: str, work: float, steps: float = 1.0) -> None:
        """Record the work that a key has received, `steps` after the previous key."""
        self._weight *= (1 + 1 / _MEMORY) ** steps
        self._used[key] = self._used.get(key, 0.0) + work * self._weight
        if self._weight > _HEAVY:
            scaled = ((key, total / self._weight) for key, total in self._used.items())
            self._used = {key: total for key, total in scaled if total > 1 / _HEAVY}
            self._weight = 1.0

    def used(self, key: str) -> float:
        """Return the decayed work that a key has received."""
        return self._used.get(key, 0.0) / self._weight

    def furthest_behind(self, keys: Iterable[str]) -> str:
        """Return the key that has received least."""
        return min(keys, key=lambda key: self._used.get(key, 0.0))

    def lag(self, key: str, keys: Iterable[str]) -> float:
        """Return the work that the busiest of these keys has received beyond this key's."""
        most = max(self._used.get(other_key, 0.0) for other_key in keys)
        return (most - self._used.get(key, 0.0)) / self._weight
