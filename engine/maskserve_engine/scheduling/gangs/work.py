"""Inputs and results of the policies for gangs of devices.

A gang is an aligned block of 1, 2, 4 or 8 devices that step a row together (its size is the
degree). Like the step scheduler, a policy only decides: it holds no tensor and reads no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from maskserve_common.shares import urgency
from maskserve_engine.scheduling.step_scheduler import AGING_S, Run, Ticket


@dataclass(slots=True)
class Work:
    """An edit with steps left. The caller updates it; policies only read it."""

    ticket: Ticket
    remaining: int
    """Steps that have not ended."""
    idle_since: float
    """Time of its arrival, or of the end of its last step."""
    gang: int = 0
    """Devices of its running or last step, as a bit mask; 0: none yet."""
    until: float | None = None
    """Time when its running step ends; None: none runs; inf: its devices are lost."""
    running_steps: int = 0
    """Steps of the current run; `remaining` includes them."""
    first: bool = False
    """Whether its key is next: if it is idle, it gets devices before all others."""


@dataclass(frozen=True, slots=True)
class GangPlan:
    """Runs that start now, on idle devices."""

    runs: tuple[Run, ...] = ()
    next_decision: float = math.inf
    """Time of the next decision, unless a new edit or the end of a run comes first."""


STRETCH = 4.0
"""Multiple of its seconds alone that an edit may wait before its age counts."""
_HELP_SHARE = 0.25
"""Largest share of device-seconds for steps that go first by age alone."""


class Aging:
    """Chooses the edit that steps before all others: one whose key is next, or sometimes one that
    the policy puts off, so that no edit starves.

    The policy puts off edits that have no due time or cannot meet it. Such an edit is helped after
    `patience` seconds without a step, one edit per fifth of that time. It is also helped when its
    age exceeds `patience` seconds plus `STRETCH` times its seconds alone, the oldest first, within
    `_HELP_SHARE` of all device-seconds. A step of priority counts as `AGING_S` seconds of age.
    """

    def __init__(self, devices: int, patience: float) -> None:
        self._devices, self._patience = devices, patience
        self._helped = -math.inf
        """Time when an edit that had not stepped was last helped."""
        self._next = -math.inf
        """Time from which the oldest edit may be helped again."""

    def choose(self, now: float, works: Sequence[Work]) -> Work | None:
        """Return the idle work that must step now; None: the policy is free to choose."""
        idle = [work for work in works if work.until is None]
        for work in idle:
            if work.first:
                return work
        put_off = [work for work in idle if slack(work, now) < 0.0]
        if not put_off:
            return None
        longest_idle = min(put_off, key=lambda work: work.idle_since)
        if (
            now - longest_idle.idle_since > self._patience
            and now - self._helped >= self._patience / 5
        ):
            self._helped = now
            return longest_idle
        old = [work for work in put_off if self._is_old(work.ticket, now)]
        if not old or now < self._next:
            return None
        return min(old, key=lambda work: age_order(work.ticket))

    def begun(self, now: float, work: Work, degree: int) -> None:
        """Note that the chosen work has begun its step on `degree` devices."""
        if not work.first:
            took = degree * work.ticket.seconds[degree.bit_length() - 1]
            self._next = now + took / (_HELP_SHARE * self._devices)

    def _is_old(self, ticket: Ticket, now: float) -> bool:
        solo_s = ticket.steps * ticket.seconds[0]
        return now - ticket.arrival > self._patience + STRETCH * solo_s


def age_order(ticket: Ticket) -> float:
    """Return the order of a ticket by age and priority, the lowest first."""
    return urgency(ticket.arrival, ticket.priority, AGING_S)


def slack(work: Work, now: float) -> float:
    """Return the seconds that an edit may still wait to be in time; below 0: it has no due time, or
    cannot meet it.
    """
    if work.ticket.due is None:
        return -math.inf
    return work.ticket.due - now - work.remaining * min(work.ticket.seconds)


class GangPolicy(Protocol):
    def decide(self, now: float, works: Sequence[Work]) -> GangPlan:
        """Give idle devices to works that do not run.

        Args:
            now: seconds of the caller's clock.
            works: all edits with steps left, running ones too, in any order.
        """
        ...


@dataclass(frozen=True, slots=True)
class Share:
    """A number of steps at one degree."""

    degree: int
    steps: int


@lru_cache(maxsize=4096)
def frontier(seconds: tuple[float, ...]) -> tuple[tuple[int, float], ...]:
    """Return the (degree, seconds of a step) of the useful degrees: more devices are faster, and no
    mix of two others is as fast at fewer device-seconds. Slowest and cheapest first.
    """
    points: list[tuple[int, float]] = []
    for index, time in enumerate(seconds):
        degree = 1 << index
        if points and time >= points[-1][1]:
            continue
        # The lower convex hull of device-seconds over seconds.
        while points and degree * time <= points[-1][0] * points[-1][1]:
            points.pop()
        while len(points) > 1 and _above(points[-2], points[-1], (degree, time)):
            points.pop()
        points.append((degree, time))
    return tuple(points)


def _above(a: tuple[int, float], b: tuple[int, float], c: tuple[int, float]) -> bool:
    """Whether a mix of `a` and `c` costs no more than `b` in the same time."""
    share = (a[1] - b[1]) / (a[1] - c[1])
    return a[0] * a[1] * (1 - share) + c[0] * c[1] * share <= b[0] * b[1]


def allocate(seconds: tuple[float, ...], steps: int, slack: float) -> tuple[Share, ...]:
    """Return at most two degrees that just meet the due time at least device-seconds (TetriServe
    §4.2.1), the higher first; none if no degree meets it.

    Args:
        seconds: seconds of a step by degree (`Ticket.seconds`).
        steps: number of steps left.
        slack: seconds until they must have ended.
    """
    points = frontier(seconds)
    slow = points[0]
    if steps * slow[1] <= slack:
        return (Share(slow[0], steps),)
    for fast in points[1:]:
        if steps * fast[1] <= slack:
            count = min(steps, math.ceil((steps * slow[1] - slack) / (slow[1] - fast[1]) - 1e-9))
            shares = (Share(fast[0], count), Share(slow[0], steps - count))
            return shares if count < steps else shares[:1]
        slow = fast
    return ()


def device_seconds(seconds: tuple[float, ...], shares: Sequence[Share]) -> float:
    return sum(s.degree * s.steps * seconds[s.degree.bit_length() - 1] for s in shares)


def seconds_together(tickets: Sequence[Ticket], degree: int) -> float:
    """Return the seconds of a step of several rows on `degree` devices."""
    index = degree.bit_length() - 1
    row_seconds = sum(ticket.seconds[index] - ticket.shared for ticket in tickets)
    return row_seconds + max(ticket.shared for ticket in tickets)


@lru_cache(maxsize=256)
def blocks(degree: int, devices: int) -> tuple[int, ...]:
    """Return the gangs of `degree` among `devices`, as bit masks (8 devices: 15 of all degrees)."""
    full = (1 << degree) - 1
    return tuple(full << at for at in range(0, devices - degree + 1, degree))


def largest_gang(devices: int, lost: int) -> int:
    """Return the size of the largest gang without a `lost` device; 0: there is none."""
    sizes = (1 << at for at in reversed(range(devices.bit_length())))
    return next((k for k in sizes if not all(block & lost for block in blocks(k, devices))), 0)


def devices_of(gang: int) -> tuple[int, ...]:
    return tuple(at for at in range(gang.bit_length()) if gang >> at & 1)


def choose_block(degree: int, devices: int, excluded: int, last: int, busy: int = 0) -> int:
    """Return a gang of `degree` without any of the `excluded` devices; 0 if there is none.

    The edit keeps its last gang if possible, else one within or around it. Then idle devices
    precede `busy` ones, and gangs in a larger block that is already in use precede others, so that
    large blocks stay whole.
    """
    best, best_rank = 0, (-1, -1, -1)
    for block in blocks(degree, devices):
        if block & excluded:
            continue
        if block == last and not block & busy:
            return block
        near = bool(block & last)
        around = _around(block, degree)
        rank = (int(not block & busy), int(near), (around & excluded).bit_count())
        if rank > best_rank:
            best, best_rank = block, rank
    return best


def _around(block: int, degree: int) -> int:
    """Return the block of twice, or four times, the size that holds `block`."""
    at = (block & -block).bit_length() - 1
    span = 4 * degree
    return ((1 << span) - 1) << (at // span * span)
