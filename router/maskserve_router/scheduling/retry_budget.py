"""Limits retries, so that a failing worker does not double the load of the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class RetryBudget:
    """Counts retries under way against edits under way.

    Args:
        share: share of the edits under way that may be retries.
        floor: retries that are always allowed.
    """

    def __init__(self, share: float, floor: int) -> None:
        self._share, self._floor = share, floor
        self.running = 0

    def allows(self, edits: int) -> bool:
        """Return whether one more retry may start beside `edits` edits under way."""
        return self.running < max(self._floor, self._share * edits)

    @contextmanager
    def spend(self) -> Iterator[None]:
        """Count a retry as under way for the block."""
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
