"""Fair shares of a resource that several clients use.

A key identifies a client: the scope of its API key, an address, or the maker of a template. Three
rules bound every shared resource (bytes in memory, edits, files, threads):

- the *budget*: all keys together use no more.
- the *share*: a key may use as much as it leaves free. One key alone may use half of the budget,
  two a third each, n 1/(n+1) each. Something is always left for the next key, and nobody configures
  the number of keys (Choudhury and Hahne's dynamic thresholds, 1998). A key that uses nothing may
  take one unit if any is free. EVERYBODY, for clients without keys, may use the whole budget.
- the *turn*: the next waiting item is one of the key that uses least; among equal keys, of the one
  that was served longest ago. So a busy key waits only behind itself.

Resources that return by themselves, such as an edit's row, need turns only: one key alone may use
all (`book`). Resources that stay as long as their user likes need shares (`take`, `hold`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

EVERYBODY = ""
"""Key of clients that are not distinguished (`contracts.keys.NO_SCOPE`)."""
_REMEMBERED = 4096
"""Idle keys whose last turn is remembered."""
T = TypeVar("T")


class Full(Exception):
    """There is no room.

    Args:
        of_key: whether the key's own share is used up, and not the budget.
    """

    def __init__(self, *, of_key: bool) -> None:
        super().__init__("the key's share is used up" if of_key else "the budget is used up")
        self.of_key = of_key


def room(budget: int, in_use: int, of_key: int, key: Hashable) -> int:
    """Return the units that a key may take now, by budget and share.

    Args:
        budget: units of all keys.
        in_use: units that all keys use.
        of_key: units that the key uses.
        key: the key.
    """
    free = max(budget - in_use, 0)
    if key == EVERYBODY:
        return free
    least = 0 if of_key else 1
    return max((free - of_key) // 2, min(free, least))


class Shares:
    """Use of one budget by key; for one thread or event loop.

    Args:
        budget: units that all keys may use together.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.total = 0
        self._in_use: Counter[Hashable] = Counter()
        self._served_at: OrderedDict[Hashable, int] = OrderedDict()
        """Key -> number of its last turn."""
        self._served = 0

    def in_use(self, key: Hashable) -> int:
        """Units that the key uses."""
        return self._in_use[key]

    @property
    def keys(self) -> int:
        """Number of keys that use anything."""
        return len(self._in_use)

    def room(self, key: Hashable) -> int:
        """Units that the key may take on now."""
        return room(self.budget, self.total, self._in_use[key], key)

    def most(self) -> Hashable:
        """Return the key that uses most, which gives up its oldest units first."""
        return max(self._in_use, key=self._in_use.__getitem__, default=EVERYBODY)

    def take(self, key: Hashable, size: int = 1) -> None:
        """Take `size` more units for the key, and record its turn.

        Raises:
            Full: there is no room for it.
        """
        if size > self.room(key):
            raise Full(of_key=size <= self.budget - self.total)
        self.book(key, size)

    def book(self, key: Hashable, size: int = 1) -> None:
        """Record a use without a check, where keys share turns only."""
        self.total += size
        self._in_use[key] += size
        self._served += 1
        self._served_at[key] = self._served
        self._served_at.move_to_end(key)
        if len(self._served_at) > _REMEMBERED:
            self._served_at.popitem(last=False)

    def give_back(self, key: Hashable, size: int = 1) -> None:
        """Return units of the key."""
        self.total -= size
        self._in_use[key] -= size
        if self._in_use[key] <= 0:
            del self._in_use[key]

    @contextmanager
    def hold(self, key: Hashable, size: int = 1) -> Iterator[None]:
        """Take so much for a time; raises as `take`."""
        self.take(key, size)
        try:
            yield
        finally:
            self.give_back(key, size)

    def fair_order(self, waiting: Iterable[T], key_of: Callable[[T], Hashable]) -> list[T]:
        """Return the waiting items in the order of their turns.

        Args:
            waiting: items; those of one key in the order in which they are served.
            key_of: returns an item's key.
        """
        ahead = Counter(self._in_use)
        ranked = []
        for place, waiter in enumerate(waiting):
            key = key_of(waiter)
            ranked.append((ahead[key], self._served_at.get(key, 0), place, waiter))
            ahead[key] += 1
        ranked.sort(key=lambda rank: rank[:3])
        return [waiter for *_, waiter in ranked]


def urgency(
    arrival: float, priority: int, aging_s: float, due: float | None = None, patience_s: float = 0.0
) -> float:
    """Return an item's place among the waiting items of a key, the lowest first. It never changes,
    so fewer and fewer items overtake a waiting one.

    Args:
        arrival: time of its arrival, in seconds of any clock.
        priority: each step of it weighs as much as `aging_s` of waiting.
        aging_s: see `priority`.
        due: due time on the same clock; None: none.
        patience_s: seconds after its arrival that stand for a missing or later due time.
    """
    target_s = arrival + patience_s
    return (target_s if due is None else min(target_s, due)) - priority * aging_s


PATIENCE_S = 120.0
"""Seconds of waiting after which an edit without due time is as urgent as one that is due now."""
