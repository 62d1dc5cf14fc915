"""Our policy: decide whenever a step ends, and keep a set of edits that can all be in time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Container, Mapping, Sequence

from maskserve_core.worker.gangs.few_edits import FewEdits
from maskserve_core.worker.gangs.work import (
    GangPlan,
    Work,
    allocate,
    choose_block,
    device_seconds,
    devices_of,
    frontier,
)
from maskserve_core.worker.step_scheduler import Run

_FEW = 4
"""Edits whose lists are searched: with more there are too many of them."""


class Deadline:
    """At each step end and arrival:

    1. An edit that its fastest degree cannot bring in time is given up.
    2. Joint demand: in the order of due times, the device-seconds that edits need must fit into
       what all devices have until then. Where they do not, the largest demand so far is given up
       (Moore and Hodgson's rule, which keeps the most edits on one machine).
    3. Those kept get the degree that just meets their due times, the least slack first; one that
       waits for devices whose step is under way has them reserved.
    4. Devices left go to edits given up or without due time, the cheapest first, then to kept
       edits that gain most by more.

    Of a few edits the best list is searched instead (`FewEdits`): it knows when devices are free,
    which sums do not. What stands behind the list then takes only devices that delay none of it.

    An edit that has not stepped for `patience` seconds gets one step before all others, so that
    edits without due time do not starve.
    """

    def __init__(self, devices: int, patience: float = 10.0, longest_step: float = 0.15) -> None:
        """Make a policy without memory of edits.

        Args:
            devices: of the worker: 1, 2, 4 or 8.
            patience: seconds without a step after which an edit is helped, one per fifth of it.
            longest_step: seconds that a step of an edit that was given up may hold devices.
        """
        self.devices = devices
        self.patience = patience
        self.longest_step = longest_step
        self._helped = -math.inf

    def decide(self, now: float, works: Sequence[Work]) -> GangPlan:
        """As `GangPolicy.decide`; each run is of one step."""
        busy = sum(work.gang for work in works if work.until is not None)
        if busy == (1 << self.devices) - 1:
            return GangPlan()
        if len(works) <= _FEW:
            return GangPlan(tuple(self._place(self._listed(now, works), busy, claimed=busy)))
        kept, rest = self._kept(now, works)
        wanted: list[tuple[Work, int]] = []
        starved = self._starved(now, rest)
        if starved is not None:
            rest.remove(starved)
            wanted.append((starved, self._short(starved)))
        wanted += kept
        wanted += [(work, self._short(work)) for work in sorted(rest, key=_cheapest)]
        return GangPlan(tuple(self._place(self._scale_up(wanted), busy)))

    def _listed(self, now: float, works: Sequence[Work]) -> list[tuple[Work, int]]:
        """What steps now, and its degree: what of the list begins, then others."""
        few = FewEdits(now, works, self.devices)
        first = few.begin()
        rest = [w for w in works if w.until is None and w not in [j.work for j, _ in few.chosen]]
        others = self._behind(now, few, first, rest)
        self._widen(few, first, others)
        return [(few.chosen[number][0].work, degree) for number, degree in first.items()] + others

    def _behind(
        self, now: float, few: FewEdits, first: Mapping[int, int], rest: Sequence[Work]
    ) -> list[tuple[Work, int]]:
        """Edits that are not in the list, on devices that delay none of it; the starved one on any
        that are idle.
        """
        others: list[tuple[Work, int]] = []
        idle, planned = few.idle - sum(first.values()), few.starts(first) or few.starts({})
        starved = self._starved(now, rest)
        for work in sorted(rest, key=lambda work: (work is not starved, _cheapest(work))):
            degree = self._short(work)
            while degree > idle:
                degree //= 2
            if not degree:
                break
            begun = few.starts(first, [*others, (work, degree)])
            if work is starved or _none_later(begun, planned, first):
                others.append((work, degree))
                idle -= degree
        return others

    def _widen(
        self, few: FewEdits, first: dict[int, int], others: Sequence[tuple[Work, int]]
    ) -> None:
        """Idle devices to those of the list that save most time by twice theirs."""
        while True:
            idle = few.idle - sum(first.values()) - sum(degree for _, degree in others)
            gains = {}
            for number, degree in first.items():
                if degree <= idle and few.starts({**first, number: 2 * degree}, others) is not None:
                    job, at = few.chosen[number][0], degree.bit_length() - 1
                    saved = job.work.ticket.seconds[at] - job.work.ticket.seconds[at + 1]
                    gains[number] = job.steps * saved
            best = max(gains, key=lambda number: gains[number], default=-1)
            if best < 0 or gains[best] <= 0.0:
                return
            first[best] *= 2

    def _starved(self, now: float, rest: Sequence[Work]) -> Work | None:
        """The one that has waited longest, if that is too long and none was helped just now."""
        idle = [work for work in rest if work.until is None]
        if not idle or now - self._helped < self.patience / 5:
            return None
        oldest = min(idle, key=lambda work: work.idle_since)
        if now - oldest.idle_since <= self.patience:
            return None
        self._helped = now
        return oldest

    def _short(self, work: Work) -> int:
        """The cheapest degree whose step is not in the way of an edit that comes now."""
        points = frontier(work.ticket.seconds)
        return next((k for k, seconds in points if seconds <= self.longest_step), points[-1][0])

    def _kept(self, now: float, works: Sequence[Work]) -> tuple[list[tuple[Work, int]], list[Work]]:
        """Edits that can all be in time, with the degree of their next step, the least slack
        first; and the others.
        """
        heap: list[tuple[float, int]] = []
        rest: list[Work] = []
        demand = 0.0
        chosen: dict[int, tuple[Work, int, float]] = {}
        ordered = sorted(
            (work for work in works if work.ticket.due is not None), key=lambda w: w.ticket.due or 0
        )
        rest += [work for work in works if work.ticket.due is None]
        for number, work in enumerate(ordered):
            seconds, steps = work.ticket.seconds, work.remaining
            start = now
            if work.until is not None:
                start, steps = work.until, steps - work.under_way
            slack = (work.ticket.due or 0.0) - start
            if not steps:
                continue
            shares = allocate(seconds, steps, slack)
            if not shares:
                rest.append(work)
                continue
            needs = device_seconds(seconds, shares)
            demand += needs
            heapq.heappush(heap, (-needs, number))
            chosen[number] = (work, shares[0].degree, slack - steps * min(seconds))
            while demand > self.devices * ((work.ticket.due or 0.0) - now):
                most, gone = heapq.heappop(heap)
                demand += most
                rest.append(chosen.pop(gone)[0])
        kept = sorted(chosen.values(), key=lambda each: each[2])
        return [(work, degree) for work, degree, _ in kept], rest

    def _scale_up(self, wanted: list[tuple[Work, int]]) -> list[tuple[Work, int]]:
        """Devices that are left, to the edits that save most time by twice theirs."""
        left = self.devices
        degrees = []
        for _, degree in wanted:
            degrees.append(degree if degree <= left else 0)
            left -= degrees[-1]
        while left:
            best, best_gain = -1, 0.0
            for index, (work, _) in enumerate(wanted):
                degree = degrees[index]
                if 0 < degree <= left and 2 * degree <= self.devices:
                    seconds, at = work.ticket.seconds, degree.bit_length() - 1
                    gain = work.remaining * (seconds[at] - seconds[at + 1])
                    if gain > best_gain:
                        best, best_gain = index, gain
            if best < 0:
                break
            left -= degrees[best]
            degrees[best] *= 2
        return [(work, degree) for (work, _), degree in zip(wanted, degrees, strict=True) if degree]

    def _place(self, wanted: list[tuple[Work, int]], busy: int, *, claimed: int = 0) -> list[Run]:
        """Gangs for those that can step now; the others claim what they wait for.

        Args:
            wanted: with their degrees, the first to be served first.
            busy: devices.
            claimed: devices that nobody may wait for.
        """
        runs = []
        for work, degree in wanted:
            last = work.gang
            own = last if work.until is not None else 0
            block = 0
            while degree and not block:
                block = choose_block(degree, self.devices, claimed, last, busy & ~own)
                degree = degree if block else degree // 2
            claimed |= block
            if block and work.until is None and not block & busy:
                runs.append(Run((work.ticket,), devices_of(block)))
        return runs


def _none_later(
    begun: Sequence[float] | None, planned: Sequence[float] | None, first: Container[int]
) -> bool:
    """Whether all that wait for devices still get them when they were to, and none is late."""
    if begun is None or planned is None:
        return False
    both = enumerate(zip(begun, planned, strict=True))
    return all(now <= then for number, (now, then) in both if number not in first)


def _cheapest(work: Work) -> tuple[float, float]:
    points = frontier(work.ticket.seconds)
    return (work.remaining * points[0][0] * points[0][1], work.ticket.arrival)
