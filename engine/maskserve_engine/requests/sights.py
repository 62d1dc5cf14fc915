"""How often each template was asked for, which says when it is worth priming."""

from __future__ import annotations

from collections import OrderedDict

_REMEMBERED = 4096
_WORTH_PRIMING = 2
"""One-shot images are not worth it: a template is primed from its second sight on."""


class Sights:
    """Counts sights of the templates seen last, by their keys."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, int] = OrderedDict()
        self._retry_at: dict[str, int] = {}
        """Sights from which a template that could not be primed is tried again."""

    def add(self, key: str) -> None:
        """An edit of that template has come."""
        self._counts[key] = self._counts.pop(key, 0) + 1
        if len(self._counts) > _REMEMBERED:
            forgotten, _ = self._counts.popitem(last=False)
            self._retry_at.pop(forgotten, None)

    def put_off(self, key: str) -> None:
        """It could not be primed: to be tried again when it has been seen twice as often."""
        if key in self._counts:  # else nobody has edited it yet
            self._retry_at[key] = 2 * self._counts[key]

    def may_prime(self, key: str) -> bool:
        """Whether it has not been put off."""
        return self._counts.get(key, 0) >= self._retry_at.get(key, 0)

    def worth_priming(self, key: str) -> bool:
        """Whether it has been seen often enough, and not been put off."""
        return self.may_prime(key) and self._counts.get(key, 0) >= _WORTH_PRIMING
