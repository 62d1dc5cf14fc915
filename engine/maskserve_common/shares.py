"""Fair shares of a resource that several clients use.

A key identifies a client: the scope of its API key, an address, or the maker of a template. Three
rules bound every shared resource (bytes in memory, edits, files, threads):

- the *budget*: all keys together use no more.
- the *share*: a key may use as much as it leaves free. One key alone may use half of the budget,
  two a third each, n 1/(n+1) each. Something is always left for the next key, and nobody configures
  the number of keys (Choudhury and Hahne's dynamic thresholds, 1998). A key that uses nothing may
  take one unit if any is free. EVERYBODY, for clients without keys, may use the whole budget.
- the *turn*: the next waiting item is one of the key that uses least; among equal keys, of the one
  that was served longest ago (`rank`). So a busy key waits only behind itself.

Resources that return by themselves, such as an edit's row, need turns only: one key alone may use
all (`book`). Resources that stay as long as their user likes need shares (`take`, `hold`). Where
keys share time and not places, their recent work decides (`KeyWork`).
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager

EVERYBODY = ""
"""Key of clients that are not distinguished (`contracts.keys.NO_SCOPE`)."""
_REMEMBERED = 4096
"""Idle keys whose last turn, or work, is remembered."""
_MEMORY = 64
"""Steps after which about a third of a key's work still counts."""
_HEAVY = 1e30


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
        self.served = 0
        """Number of the last turn."""

    def in_use(self, key: Hashable) -> int:
        """Units that the key uses."""
        return self._in_use[key]

    @property
    def free(self) -> int:
        """Units that nobody uses."""
        return self.budget - self.total

    def room(self, key: Hashable) -> int:
        """Units that the key may take on now."""
        return room(self.budget, self.total, self._in_use[key], key)

    def most(self) -> Hashable:
        """Return the key that uses most, which gives up its oldest units first."""
        return max(self._in_use, key=self._in_use.__getitem__, default=EVERYBODY)

    def take(self, key: Hashable, size: int = 1) -> None:
        """Take `size` more units for the key, and record its turn; raises as `check`."""
        self.check(key, size)
        self.book(key, size)

    def check(self, key: Hashable, size: int = 1) -> None:
        """Check that the key may take `size` more units.

        Raises:
            Full: there is no room for it.
        """
        if size > self.room(key):
            raise Full(of_key=size <= self.free)

    def book(self, key: Hashable, size: int = 1) -> None:
        """Record a use without a check, where keys share turns only."""
        self.total += size
        self._in_use[key] += size
        self.served += 1
        self._served_at[key] = self.served
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

    def rank(self, key: Hashable) -> tuple[int, int]:
        """Return the key's place in the order of turns: the lowest is next."""
        return self._in_use[key], self._served_at.get(key, 0)


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


class KeyWork:
    """Recent work of each key; the key with least lags. Keys that send requests only occasionally
    are served before busy keys. Earlier work decays (`add`), or counts up to a bound (`catch_up`),
    so a busy key never waits long, and two busy keys share equally.
    """

    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        self._weight = 1.0
        """Weight of work that is added now. It grows, so that earlier work counts less."""

    def add(self, key: str, work: float, steps: float = 1.0) -> None:
        """Record the work that a key has received, `steps` after the previous key; at 0 nothing
        decays.
        """
        self._weight *= (1 + 1 / _MEMORY) ** steps
        self._used[key] = self._used.get(key, 0.0) + work * self._weight
        if len(self._used) > _REMEMBERED:
            busiest = heapq.nlargest(_REMEMBERED // 2, self._used, key=self._used.__getitem__)
            self._used = {key: self._used[key] for key in busiest}
        if self._weight > _HEAVY:
            scaled = ((key, total / self._weight) for key, total in self._used.items())
            self._used = {key: total for key, total in scaled if total > 1 / _HEAVY}
            self._weight = 1.0

    def catch_up(self, keys: Iterable[str], most: float) -> None:
        """Forget what each of these keys lags more than `most` behind the busiest of them."""
        used = {key: self._used.get(key, 0.0) for key in keys}
        floor = max(used.values()) - most * self._weight
        self._used |= {key: max(work, floor) for key, work in used.items()}

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
