"""What the policies for gangs of devices decide over, and what they decide.

A gang is an aligned block of 1, 2, 4 or 8 devices that steps a row together (its size is the
degree). As the step scheduler, a policy only decides: it holds no tensor and reads no clock.
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
    """An edit with steps left. The caller keeps it true; policies only read it."""

    ticket: Ticket
    remaining: int
    """Steps that have not ended."""
    idle_since: float
    """When it came, or when its last step ended."""
    gang: int = 0
    """The devices that step it or did so last, as a bit mask; 0: none yet."""
    until: float | None = None
    """When the step that runs ends; None: none runs; inf: its devices are lost."""
    under_way: int = 0
    """Steps of the run that has not ended; they count as remaining."""
    first: bool = False
    """It is its key's turn: if it does not run it gets devices before all others."""


@dataclass(frozen=True, slots=True)
class GangPlan:
    """What starts now. Devices that run are never in it."""

    runs: tuple[Run, ...] = ()
    again: float = math.inf
    """Ask again at this time; also when an edit comes or a run ends."""


STRETCH = 4.0
"""Times what an edit takes by itself that it may wait before its age counts."""
_HELP_SHARE = 0.25
"""Of all device-seconds, the most that steps take which age alone puts before others."""


class Aged:
    """Which edit steps before all others: one whose key's turn it is, or now and then one that a
    policy puts off, so that none starves, whatever comes.

    An edit without due time, or that cannot be in time, is helped when it has not stepped for
    `patience` seconds, one per fifth of that; and when it is there for `patience` and `STRETCH`
    times what it takes by itself, the oldest first, within `_HELP_SHARE` of all device-seconds. A
    step of priority is worth `AGING_S` of age.

    Args:
        devices: of the worker.
        patience: see there.
    """

    def __init__(self, devices: int, patience: float) -> None:
        self._devices, self._patience = devices, patience
        self._helped = -math.inf
        """When one was helped last that had not stepped."""
        self._next = -math.inf
        """When the oldest may be helped again."""

    def choose(self, now: float, works: Sequence[Work]) -> Work | None:
        """Of those that do not run the one that is to step now; None: the policy decides alone."""
        idle = [work for work in works if work.until is None]
        for work in idle:
            if work.first:
                return work
        put_off = [work for work in idle if slack(work, now) < 0.0]
        if not put_off:
            return None
        stiff = min(put_off, key=lambda work: work.idle_since)
        if now - stiff.idle_since > self._patience and now - self._helped >= self._patience / 5:
            self._helped = now
            return stiff
        old = [work for work in put_off if self._is_old(work.ticket, now)]
        if not old or now < self._next:
            return None
        return min(old, key=lambda work: age_order(work.ticket))

    def begun(self, now: float, work: Work, degree: int) -> None:
        """What was chosen has got its step, on so many devices."""
        if not work.first:
            took = degree * work.ticket.seconds[degree.bit_length() - 1]
            self._next = now + took / (_HELP_SHARE * self._devices)

    def _is_old(self, ticket: Ticket, now: float) -> bool:
        solo_s = ticket.steps * ticket.seconds[0]
        return now - ticket.arrival > self._patience + STRETCH * solo_s


def age_order(ticket: Ticket) -> float:
    """By age and priority, the lowest first."""
    return urgency(ticket.arrival, ticket.priority, AGING_S)


def slack(work: Work, now: float) -> float:
    """Seconds that an edit may wait which is to be in time; below 0: it need not be, or cannot."""
    if work.ticket.due is None:
        return -math.inf
    return work.ticket.due - now - work.remaining * min(work.ticket.seconds)


class GangPolicy(Protocol):
    """Decides which gangs step which edits."""

    def decide(self, now: float, works: Sequence[Work]) -> GangPlan:
        """Give idle devices to works that do not run.

        Args:
            now: seconds of the caller's clock.
            works: all edits with steps left, running ones too, in any order.
        """
        ...


@dataclass(frozen=True, slots=True)
class Share:
    """Steps of an edit at one degree."""

    degree: int
    steps: int


@lru_cache(maxsize=4096)
def frontier(seconds: tuple[float, ...]) -> tuple[tuple[int, float], ...]:
    """(degree, seconds of a step) of the degrees worth having: more devices are faster, and no
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
    """At most two degrees that just meet the due time at least device-seconds (TetriServe §4.2.1),
    the higher first; empty where no degree meets it.

    Args:
        seconds: of a step by degree, as `Ticket.seconds`.
        steps: that are left.
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
    """What `shares` take of the worker."""
    return sum(s.degree * s.steps * seconds[s.degree.bit_length() - 1] for s in shares)


def seconds_together(tickets: Sequence[Ticket], degree: int) -> float:
    """Of a step of several rows on so many devices."""
    index = degree.bit_length() - 1
    row_seconds = sum(ticket.seconds[index] - ticket.shared for ticket in tickets)
    return row_seconds + max(ticket.shared for ticket in tickets)


@lru_cache(maxsize=256)
def blocks(degree: int, devices: int) -> tuple[int, ...]:
    """The gangs of `degree` among `devices`, as bit masks: 15 of all degrees for 8 devices."""
    full = (1 << degree) - 1
    return tuple(full << at for at in range(0, devices - degree + 1, degree))


def largest_gang(devices: int, lost: int) -> int:
    """How many devices the largest gang has that touches none of `lost`; 0: there is none."""
    sizes = (1 << at for at in reversed(range(devices.bit_length())))
    return next((k for k in sizes if not all(block & lost for block in blocks(k, devices))), 0)


def devices_of(gang: int) -> tuple[int, ...]:
    """The numbers in a bit mask."""
    return tuple(at for at in range(gang.bit_length()) if gang >> at & 1)


def choose_block(degree: int, devices: int, taken: int, last: int, busy: int = 0) -> int:
    """A gang of `degree` that touches none of `taken`; 0 if there is none.

    The edit's last gang is kept where it can be, then one within or around it; then idle devices
    rather than `busy` ones; then the gang whose larger block is in use already, so that large
    blocks stay whole.
    """
    best, best_rank = 0, (-1, -1, -1)
    for block in blocks(degree, devices):
        if block & taken:
            continue
        if block == last and not block & busy:
            return block
        near = bool(block & last)
        around = _around(block, degree)
        rank = (int(not block & busy), int(near), (around & taken).bit_count())
        if rank > best_rank:
            best, best_rank = block, rank
    return best


def _around(block: int, degree: int) -> int:
    """The block of twice and of four times the size that holds `block`."""
    at = (block & -block).bit_length() - 1
    span = 4 * degree
    return ((1 << span) - 1) << (at // span * span)
