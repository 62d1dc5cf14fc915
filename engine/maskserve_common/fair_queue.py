"""The one queue in which items of several keys wait for places: edits and calls at the router,
tickets of a worker, jobs of threads. Callers add the wait, of a future or of a thread.

The next place goes to the key that holds fewest places; among equal keys, to the one that was
served longest ago (`maskserve_common.shares`). Of a key's items, the most urgent one is next, then
the oldest.
"""

from __future__ import annotations

import heapq
import itertools
import sys
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from maskserve_common.shares import Shares

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Turn(Generic[T]):
    """The turn of a waiting item."""

    order: tuple[float, int]
    """Urgency and number, which are unique; the lowest of a key is next."""
    key: Hashable
    item: T
    line: Hashable

    def __lt__(self, other: Turn[T]) -> bool:
        return self.order < other.order


class FairQueue(Generic[T]):
    """Waiting items, and the places that each key holds; for one thread or event loop.

    A dispatch reads one item of each key, however many wait.

    Args:
        places: places of all keys (`held.budget`); 0: the caller knows which are free.
        most_waiting: most items that may wait; each key has a share of them (`waiting.check`).
    """

    def __init__(self, places: int = 0, most_waiting: int = sys.maxsize) -> None:
        self.places, self.waiting = Shares(places), Shares(most_waiting)
        self._lines: dict[Hashable, dict[Hashable, list[Turn[T]]]] = {}
        """Key -> line -> turns in order; none is empty."""
        self._number = 0

    def __len__(self) -> int:
        return self.waiting.total

    def put(self, key: Hashable, item: T, urgency: float = 0.0, line: Hashable = None) -> Turn[T]:
        """Add an item, even beyond `most_waiting`.

        Args:
            key: key that the place is booked to.
            item: the waiting item.
            urgency: lowest is first among the key's items (`maskserve_common.shares.urgency`).
            line: items of one key and line fit the same places.
        """
        self._number += 1
        turn = Turn((urgency, self._number), key, item, line)
        insort(self._lines.setdefault(key, {}).setdefault(line, []), turn)
        self.waiting.book(key)
        return turn

    def cancel(self, turn: Turn[T]) -> bool:
        """Remove an item. Return False if it waits no longer."""
        lines = self._lines.get(turn.key, {})
        line = lines.get(turn.line, [])
        index = bisect_left(line, turn)
        if index == len(line) or line[index] is not turn:
            return False
        del line[index]
        if not line:
            del lines[turn.line]
        if not lines:
            del self._lines[turn.key]
        self.waiting.give_back(turn.key)
        return True

    def offers(self) -> Iterator[Turn[T]]:
        """Yield the turns to which the next free place is offered, one after another.

        The caller takes or cancels each, or leaves it, and then the rest of its line gets no offer.
        """
        heads = [
            (self.places.rank(key), line[0])
            for key, lines in self._lines.items()
            for line in lines.values()
        ]
        heapq.heapify(heads)
        while heads:
            rank, turn = heads[0]
            if rank != self.places.rank(turn.key):  # another line of the key took a place
                heapq.heapreplace(heads, (self.places.rank(turn.key), turn))
                continue
            yield turn
            line = self._lines.get(turn.key, {}).get(turn.line)
            if line is None or line[0] is turn:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (self.places.rank(turn.key), line[0]))

    def take(self, turn: Turn[T]) -> None:
        """Remove an item, whose key holds a place from now on."""
        self.cancel(turn)
        self.places.book(turn.key)

    def give_back(self, key: Hashable) -> None:
        """Return a place of the key."""
        self.places.give_back(key)

    def order(self) -> Iterator[Turn[T]]:
        """Yield the turns in the order in which they get places if none is given back.

        The queue must not change meanwhile.
        """
        heads: list[tuple[tuple[int, int], Turn[T], Iterator[Turn[T]]]] = []
        for key, lines in self._lines.items():
            merged = heapq.merge(*lines.values())
            heads.append((self.places.rank(key), next(merged), merged))
        heapq.heapify(heads)
        for number in itertools.count(self.places.served + 1):
            if not heads:
                return
            (count, _), turn, turns = heads[0]
            yield turn
            if (following := next(turns, None)) is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, ((count + 1, number), following, turns))

    def check_integrity(self) -> bool:
        """Whether all structures agree."""
        lines = [line for lines in self._lines.values() for line in lines.values()]
        return (
            all(self._lines.values())
            and all(line and line == sorted(line) for line in lines)
            and sum(map(len, lines)) == len(self)
        )
