"""What the step scheduler decides over, and what it decides."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ticket:
    """What the scheduler knows of an edit. Times are seconds of the caller's clock."""

    request_id: str
    steps: int
    """Model calls from start to end."""
    total_tokens: int
    active_tokens: int
    """Tokens computed per step; all of them for a dense row."""
    arrival: float
    priority: int = 0
    deadline: float | None = None
    background: bool = False
    """Priming: gives way to live edits."""
    batch_key: Hashable = None
    """Rows of equal keys may share a step."""

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 <= self.active_tokens <= self.total_tokens:
            raise ValueError(f"ticket {self.request_id}: no such work: {self}")
        if math.isnan(self.arrival) or (self.deadline is not None and math.isnan(self.deadline)):
            raise ValueError(f"ticket {self.request_id}: a time is not a number: {self}")


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do at one step boundary."""

    admitted: tuple[Ticket, ...]
    """Tickets that get a row now, in order."""
    running: tuple[Ticket, ...]
    """Rows of this step: live ones, then background ones, each in order of admission. The admitted
    are among them, parked rows are not."""
    expired: tuple[Ticket, ...]
    """Tickets whose deadline has passed, waiting or running: already removed."""
