"""What is kept so that it need not be computed again: values by key, within a budget of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Kept(Generic[K, V]):
    """Values by key; the least recently used go first. Used by one thread.

    Who reads a value keeps it, also when it has left this place.

    Args:
        budget: bytes of all values; a value that is larger is not kept, so 0 keeps none.
        nbytes: of a value.
    """

    def __init__(self, budget: int, nbytes: Callable[[V], int]) -> None:
        self._budget, self._nbytes = budget, nbytes
        self._values: OrderedDict[K, V] = OrderedDict()
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def get(self, key: K) -> V | None:
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> list[K]:
        """Keys of what is kept no more for it; its own if it is too large."""
        self.drop(key)
        size = self._nbytes(value)
        if size > self._budget:
            return [key]
        gone = []
        while self.held_bytes + size > self._budget:
            gone.append(next(iter(self._values)))
            self.drop(gone[-1])
        self._values[key] = value
        self.held_bytes += size
        return gone

    def drop(self, key: K) -> None:
        """Nothing happens where it is not kept."""
        value = self._values.pop(key, None)
        if value is not None:
            self.held_bytes -= self._nbytes(value)
