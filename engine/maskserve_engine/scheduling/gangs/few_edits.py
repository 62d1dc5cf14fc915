"""Search for a set of a few edits that can all be in time; sums over all devices would mislead.

A *list* names edits and a degree for each. Served in its order, each edit takes its degree as soon
as so many devices are free, and keeps it to its last step. The search finds the list with the most
edits, then the fewest device-seconds. Only the steps that begin now are used: at the next step end
the search begins again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from maskserve_engine.scheduling.gangs.work import Work, devices_of

NODES = 120
"""Nodes of the tree of lists that a search visits. Its first list has the edits by slack, each with
the fewest devices that suffice.
"""

_OVERDUE_S = 1e-3
"""Seconds after which an overdue step counts as done."""

_Free = tuple[float, ...]
"""Times when devices are free, the earliest first."""


class Job(NamedTuple):
    """The rest of an edit behind its running step."""

    work: Work
    ready: float
    steps: int
    due: float
    degrees: tuple[tuple[int, float], ...]
    """(degree, seconds of a step), each faster than those before."""

    @property
    def slack(self) -> float:
        return self.due - self.ready - self.steps * self.degrees[-1][1]


class FewEdits:
    """The best list, found on construction.

    Args:
        now: seconds of the caller's clock.
        works: all edits with steps left.
        most: size of the largest gang; None: all devices.
    """

    def __init__(
        self, now: float, works: Sequence[Work], devices: int, most: int | None = None
    ) -> None:
        self.now = now
        free = [now] * devices
        for work in works:
            if work.until is not None:
                for device in devices_of(work.gang):
                    free[device] = max(work.until, now + _OVERDUE_S)
        self.idle = free.count(now)
        self._free: _Free = tuple(sorted(free))
        jobs = [_job(now, work, most or devices) for work in works if work.ticket.due is not None]
        hopeful = [job for job in jobs if job.steps and job.slack >= 0.0]
        self.chosen = _search(sorted(hopeful, key=lambda job: job.slack), self._free)

    def begin(self) -> dict[int, int]:
        """Return the works of the list that begin now, by number, with their degrees."""
        planned = self.starts({})
        assert planned is not None
        pairs = enumerate(zip(self.chosen, planned, strict=True))
        return {
            number: degree
            for number, ((job, degree), start) in pairs
            if job.work.until is None and start <= self.now
        }

    def starts(
        self, first: Mapping[int, int], placed: Sequence[tuple[Work, int]] = ()
    ) -> list[float] | None:
        """Return when each edit of the list continues; None: one would be late.

        Args:
            first: edits of the list that take one step now, by number, and its degree.
            placed: edits outside the list that take a step now, and its degree.
        """
        free, ready = self._free, {}
        for number, degree in first.items():
            ready[number] = self.now + _seconds(self.chosen[number][0].work, degree)
            free = _with_busy(free, degree, ready[number])
        for work, degree in placed:
            free = _with_busy(free, degree, self.now + _seconds(work, degree))
        starts = []
        for number, (job, degree) in enumerate(self.chosen):
            steps, begin = job.steps - (number in first), ready.get(number, job.ready)
            if steps:
                begin = max(begin, free[degree - 1])
            end = begin + steps * _seconds(job.work, degree)
            if end > job.due:
                return None
            if steps:
                free = _with_busy(free, degree, end)
            starts.append(begin)
        return starts


def _job(now: float, work: Work, most: int) -> Job:
    ready, steps = now, work.remaining
    if work.until is not None:
        ready, steps = max(work.until, now + _OVERDUE_S), steps - work.running_steps
    degrees: list[tuple[int, float]] = []
    for power, seconds in enumerate(work.ticket.seconds):
        if 1 << power <= most and (not degrees or seconds < degrees[-1][1]):
            degrees.append((1 << power, seconds))
    due_at = math.inf if work.ticket.due is None else work.ticket.due + 1e-9
    return Job(work, ready, steps, due_at, tuple(degrees))


def _search(jobs: Sequence[Job], free: _Free) -> tuple[tuple[Job, int], ...]:
    best: tuple[tuple[Job, int], ...] = ()
    best_demand, nodes = 0.0, NODES

    def extend(
        left: tuple[Job, ...], free: _Free, chosen: tuple[tuple[Job, int], ...], demand: float
    ) -> None:
        nonlocal best, best_demand, nodes
        if (len(chosen), -demand) > (len(best), -best_demand):
            best, best_demand = chosen, demand
        if nodes <= 0 or (len(chosen) + len(left), -demand) <= (len(best), -best_demand):
            return
        nodes -= 1
        for number, job in enumerate(left):
            later_jobs = left[:number] + left[number + 1 :]
            for degree, seconds in job.degrees:
                duration_s = job.steps * seconds
                end = max(free[degree - 1], job.ready) + duration_s
                if end <= job.due:
                    next_free = _with_busy(free, degree, end)
                    demand_with = demand + degree * duration_s
                    extend(later_jobs, next_free, (*chosen, (job, degree)), demand_with)

    extend(tuple(jobs), free, (), 0.0)
    return best


def _with_busy(free: _Free, degree: int, end: float) -> _Free:
    """Return when devices are free if the first `degree` of them are busy until `end`."""
    return tuple(sorted((*free[degree:], *(end,) * degree)))


def _seconds(work: Work, degree: int) -> float:
    return work.ticket.seconds[degree.bit_length() - 1]
