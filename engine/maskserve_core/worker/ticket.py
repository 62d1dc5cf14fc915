"""What the step scheduler decides over, and what it decides."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol


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
    cost: float = 0.0
    """Predicted of one step by itself, in FLOPs or seconds: tickets of one maker compare. 0: not
    known."""
    due: float | None = None
    """When its last step should have ended; unlike after `deadline` it goes on when it has not."""
    seconds: tuple[float, ...] = ()
    """Predicted of one step by itself on 1, 2, 4 and 8 devices, as far as there are; empty where
    nobody asks for more than one."""

    def __post_init__(self) -> None:
        fits = 0 <= self.active_tokens <= self.total_tokens
        if self.steps < 1 or not fits or not self.cost >= 0.0:
            raise ValueError(f"ticket {self.request_id}: no such work: {self}")
        if not all(0.0 < t < math.inf for t in self.seconds):
            raise ValueError(f"ticket {self.request_id}: no such times of a step: {self}")
        if any(math.isnan(t) for t in (self.arrival, self.deadline, self.due) if t is not None):
            raise ValueError(f"ticket {self.request_id}: a time is not a number: {self}")


@dataclass(frozen=True, slots=True)
class Run:
    """Rows that share model calls."""

    rows: tuple[Ticket, ...]
    devices: tuple[int, ...] = (0,)
    """Of the worker, that compute them together."""
    steps: int = 1
    """Calls until the next decision; a row that ends earlier leaves earlier."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do at one step boundary."""

    admitted: tuple[Ticket, ...]
    """Tickets that get a row now, in order."""
    runs: tuple[Run, ...]
    """No row is in two of them. The admitted need not be among their rows, parked rows are not."""
    expired: tuple[Ticket, ...]
    """Tickets whose deadline has passed, waiting or running: already removed."""

    @property
    def running(self) -> tuple[Ticket, ...]:
        """Rows of all runs."""
        if len(self.runs) == 1:
            return self.runs[0].rows
        return tuple(ticket for run in self.runs for ticket in run.rows)


class SchedulingPolicy(Protocol):
    """Decides which rows run, where and for how long; the engine and the simulator run the same.

    It holds tickets, never tensors, and reads no clock. One thread owns it. Tickets that it holds
    leave by exactly one of `finish`, `cancel` or `Decision.expired`.
    """

    @property
    def running(self) -> tuple[Ticket, ...]:
        """Tickets that hold a row, in this step or not."""
        ...

    @property
    def waiting(self) -> tuple[Ticket, ...]:
        """Tickets without a row, in the order in which they will get one."""
        ...

    def __len__(self) -> int:
        """Tickets held."""
        ...

    def submit(self, ticket: Ticket) -> None:
        """Queue a ticket.

        Raises:
            Overloaded: no more are taken.
            InvalidRequest: a ticket of this id is still held.
        """
        ...

    def cancel(self, request_id: str) -> Ticket | None:
        """Remove a ticket wherever it is; None: it is not held."""
        ...

    def finish(self, request_id: str) -> None:
        """The row has taken its last step.

        Raises:
            KeyError: no row of that name runs.
        """
        ...

    def drain(self) -> None:
        """Refuse new tickets from now on; those held go on."""
        ...

    def schedule(self, now: float) -> Decision:
        """Decide what runs until the next decision; the caller then runs it."""
        ...

    def check_integrity(self) -> None:
        """Raises RuntimeError naming the invariant that does not hold."""
        ...


MakePolicy = Callable[[int, int, float], SchedulingPolicy]
"""Of rows of the batch, tickets that may wait, and the share of work that priming may add."""
