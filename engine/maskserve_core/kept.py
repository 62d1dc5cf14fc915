"""What is kept so that it need not be made again: values by key, within a budget."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from maskserve_core.shares import EVERYBODY, Shares

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Kept(Generic[K, V]):
    """Values by key; the least recently used go first. Used by one thread or event loop.

    Who reads a value keeps it, also when it has left this place.

    Args:
        budget: of all values; a value that is larger is not kept, so 0 keeps none.
        nbytes: of a value; by default each counts 1.
        owner: whose a key is, where several share the budget (`shares.py`): one makes room of its
            own values once its share is used up, else of those of who has most.
        expires_s: after its last use a value goes.
        now: a clock, in seconds.
    """

    def __init__(
        self,
        budget: int,
        nbytes: Callable[[V], int] = lambda value: 1,
        owner: Callable[[K], Hashable] = lambda key: EVERYBODY,
        expires_s: float = math.inf,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nbytes, self._owner, self._expires_s, self._now = nbytes, owner, expires_s, now
        self._shares = Shares(budget)
        self._values: OrderedDict[K, tuple[V, float]] = OrderedDict()
        """With the time of its last use; the oldest first."""

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    @property
    def held_bytes(self) -> int:
        return self._shares.total

    def get(self, key: K) -> V | None:
        self._expire()
        if key not in self._values:
            return None
        value, _ = self._values[key]
        self._use(key, value)
        return value

    def put(self, key: K, value: V) -> list[K]:
        """Keys of what is kept no more for it; its own if it is too large."""
        self.drop(key)
        self._expire()
        shares, size, owner = self._shares, self._nbytes(value), self._owner(key)
        if size > shares.budget:
            return [key]
        gone = []
        while size > (free := shares.budget - shares.total) or (
            shares.held(owner) and size > shares.room(owner)
        ):
            whose = owner if size <= free else shares.most()
            gone.append(next(each for each in self._values if self._owner(each) == whose))
            self.drop(gone[-1])
        self._use(key, value)
        shares.book(owner, size)
        return gone

    def drop(self, key: K) -> None:
        """Nothing happens where it is not kept."""
        if key in self._values:
            value, _ = self._values.pop(key)
            self._shares.give_back(self._owner(key), self._nbytes(value))

    def _use(self, key: K, value: V) -> None:
        self._values[key] = value, self._now()
        self._values.move_to_end(key)

    def _expire(self) -> None:
        last = self._now() - self._expires_s
        while self._values and self._values[key := next(iter(self._values))][1] < last:
            self.drop(key)
