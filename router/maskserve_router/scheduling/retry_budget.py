"""How many retries may be under way: else a failing worker's load falls on the others twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class RetryBudget:
    """Retries under way against edits under way.

    Args:
        share: of the edits under way that may be retries.
        floor: retries that are always allowed.
    """

    def __init__(self, share: float, floor: int) -> None:
        self._share, self._floor = share, floor
        self.under_way = 0

    def allows(self, edits: int) -> bool:
        """Whether one more retry may start beside so many edits under way."""
        return self.under_way < max(self._floor, self._share * edits)

    @contextmanager
    def spend(self) -> Iterator[None]:
        """A retry is under way."""
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1
