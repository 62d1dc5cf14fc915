"""Cache of values by key within a budget of bytes, shared fairly by owners."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from maskserve_common.shares import EVERYBODY, Shares

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """Values by key; the least recently used are evicted first. Used by one thread or event loop.

    A reader keeps its value, also after eviction.

    Args:
        budget: budget of all values; a larger value is not kept, so 0 keeps none.
        nbytes: returns the size of a value; by default 1.
        owner: returns the owner of a key, if several share the budget (`shares.py`). An owner
            evicts its own values once its share is used up, otherwise values of the owner that has
            most.
        expires_s: seconds after its last use when a value is evicted.
        now: clock, in seconds.
        on_evict: called with each key and value that is no longer kept, unless a new value replaces
            it.
    """

    def __init__(
        self,
        budget: int,
        nbytes: Callable[[V], int] = lambda value: 1,
        owner: Callable[[K], Hashable] = lambda key: EVERYBODY,
        expires_s: float = math.inf,
        now: Callable[[], float] = time.monotonic,
        on_evict: Callable[[K, V], None] = lambda key, value: None,
    ) -> None:
        self._nbytes, self._owner, self._expires_s, self._now = nbytes, owner, expires_s, now
        self._on_evict = on_evict
        self._shares = Shares(budget)
        self._values: OrderedDict[K, tuple[V, float]] = OrderedDict()
        """Values with the time of their last use, the oldest first."""

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[K]:
        """Yield the keys, the least recently used first."""
        return iter(self._values)

    @property
    def nbytes(self) -> int:
        return self._shares.total

    def get(self, key: K) -> V | None:
        self.expire()
        if key not in self._values:
            return None
        value, _ = self._values[key]
        self._use(key, value)
        return value

    def put(self, key: K, value: V) -> None:
        """Store a value, and evict others to make room; a value that is too large is dropped at
        once.
        """
        self._let_go(key)
        self.expire()
        shares, size, owner = self._shares, self._nbytes(value), self._owner(key)
        if size > shares.budget:
            self._on_evict(key, value)
            return
        while size > (free := shares.budget - shares.total) or (
            shares.in_use(owner) and size > shares.room(owner)
        ):
            victim_owner = owner if size <= free else shares.most()
            self.drop(
                next(
                    candidate
                    for candidate in self._values
                    if self._owner(candidate) == victim_owner
                )
            )
        self._use(key, value)
        shares.book(owner, size)

    def drop(self, key: K) -> None:
        """Remove a key, if it is kept."""
        for value in self._let_go(key):
            self._on_evict(key, value)

    def expire(self) -> None:
        """Remove expired values; `get` and `put` also do so."""
        last = self._now() - self._expires_s
        while self._values and self._values[key := next(iter(self._values))][1] < last:
            self.drop(key)

    def _use(self, key: K, value: V) -> None:
        self._values[key] = value, self._now()
        self._values.move_to_end(key)

    def _let_go(self, key: K) -> list[V]:
        """Remove a key and return its value, if there is one."""
        if key not in self._values:
            return []
        value, _ = self._values.pop(key)
        self._shares.give_back(self._owner(key), self._nbytes(value))
        return [value]
