"""The policy `deadline`: at each step end it keeps a set of edits that can be in time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace

from maskserve_engine.scheduling.gangs.few_edits import FewEdits
from maskserve_engine.scheduling.gangs.work import (
    Aging,
    GangPlan,
    Work,
    allocate,
    choose_block,
    device_seconds,
    devices_of,
    frontier,
    largest_gang,
)
from maskserve_engine.scheduling.step_scheduler import Run

_FEW = 4
"""Most edits whose lists are searched; more edits have too many lists."""


class Deadline:
    """Decides at each step end and arrival:

    1. An edit that cannot be in time even at its fastest degree is given up.
    2. Joint demand: in the order of due times, the device-seconds that edits need must fit into the
       time of all devices until then. If they do not, the largest demand so far is given up (Moore
       and Hodgson's rule, which keeps the most edits on one machine).
    3. Kept edits get the degree that just meets their due times, the least slack first. If an edit
       waits for devices that run a step, they are reserved for it.
    4. Other devices go to edits given up or without due time, the cheapest first, then to the kept
       edits that gain most by more devices.

    If there are few edits, a search for the best list replaces this (`FewEdits`): it knows when
    devices are free, which sums do not. Edits behind the list then take only devices that delay
    none of it.

    No device idles for nothing. A device that nobody waits for goes to any edit; a reserved one
    goes to edits whose step ends before the waiting edit can begin.

    An edit whose key has its turn, and sometimes one that has waited too long, gets a step before
    all others (`Aging`), so that no key and no edit starves.
    """

    def __init__(self, devices: int, patience: float = 10.0, longest_step: float = 0.15) -> None:
        """Make a policy without memory of edits.

        Args:
            devices: number of the worker's devices: 1, 2, 4 or 8.
            patience: seconds without a step after which an edit is helped.
            longest_step: seconds that a step of an edit that was given up may hold devices.
        """
        self.devices = devices
        self.longest_step = longest_step
        self._aging = Aging(devices, patience)

    def decide(self, now: float, works: Sequence[Work]) -> GangPlan:
        """Decide as `GangPolicy.decide` does; each run is of one step."""
        timeline = _Timeline(now, works, self.devices)
        if not timeline.idle or not any(work.until is None for work in works):
            return GangPlan()
        first = self._aging.choose(now, works)
        if first is not None:
            timeline.place(first, self._short(timeline, first), timeline.busy)
            begun = timeline.begun(first)
            self._aging.begun(now, first, begun.gang.bit_count())
            works = [begun if work is first else work for work in works]
        if len(works) <= _FEW:
            choices, waits = self._listed(timeline, works)
            for work, degree in choices:
                timeline.place(work, degree, timeline.busy)
            if waits:
                timeline.claimed = -1  # the list says when each device is needed
        else:
            self._place_by_demand(timeline, works)
        timeline.fill(sorted(works, key=_cheapest))
        return GangPlan(tuple(timeline.runs))

    def _place_by_demand(self, timeline: _Timeline, works: Sequence[Work]) -> None:
        on_time, remaining = self._in_time(timeline, works)
        hopeful = {work.ticket.request_id for work, _ in on_time}
        best_effort = [
            (work, self._short(timeline, work)) for work in sorted(remaining, key=_cheapest)
        ]
        for work, degree in self._scale_up(timeline, on_time + best_effort):
            # Devices are reserved only for an edit that can be in time.
            if work.ticket.request_id in hopeful:
                timeline.place(work, degree)
            elif work.until is None:
                timeline.place(work, degree, timeline.busy)

    def _listed(
        self, timeline: _Timeline, works: Sequence[Work]
    ) -> tuple[list[tuple[Work, int]], bool]:
        """Return the works that step now with their degrees, those of the list first; and whether
        later works of the list remain.
        """
        few = FewEdits(timeline.now, works, self.devices, timeline.most)
        first = few.begin()
        unlisted = [
            w for w in works if w.until is None and w not in [j.work for j, _ in few.chosen]
        ]
        best_effort = self._after_begun(timeline, few, first, unlisted)
        self._widen(few, first, best_effort)
        begun = [(few.chosen[number][0].work, degree) for number, degree in first.items()]
        waits = any(job.steps > (n in first) for n, (job, _) in enumerate(few.chosen))
        return begun + best_effort, waits

    def _after_begun(
        self,
        timeline: _Timeline,
        few: FewEdits,
        first: Mapping[int, int],
        later_works: Sequence[Work],
    ) -> list[tuple[Work, int]]:
        """Return works outside the list, for devices that delay none of it."""
        placed: list[tuple[Work, int]] = []
        idle, planned = few.idle - sum(first.values()), few.starts(first) or few.starts({})
        for work in sorted(later_works, key=_cheapest):
            degree = self._short(timeline, work)
            while degree > idle:
                degree //= 2
            if not degree:
                break
            begun = few.starts(first, [*placed, (work, degree)])
            if _delays_none(begun, planned, first):
                placed.append((work, degree))
                idle -= degree
        return placed

    def _widen(
        self, few: FewEdits, first: dict[int, int], placed: Sequence[tuple[Work, int]]
    ) -> None:
        """Give idle devices to works of the list that save most time at twice their degree."""
        while True:
            idle = few.idle - sum(first.values()) - sum(degree for _, degree in placed)
            gains = {}
            for number, degree in first.items():
                if degree <= idle and few.starts({**first, number: 2 * degree}, placed) is not None:
                    job, at = few.chosen[number][0], degree.bit_length() - 1
                    saved = job.work.ticket.seconds[at] - job.work.ticket.seconds[at + 1]
                    gains[number] = job.steps * saved
            best = max(gains, key=lambda number: gains[number], default=-1)
            if best < 0 or gains[best] <= 0.0:
                return
            first[best] *= 2

    def _short(self, timeline: _Timeline, work: Work) -> int:
        """Return the cheapest degree whose step does not delay an edit that arrives now."""
        points = frontier(timeline.seconds(work))
        return next((k for k, seconds in points if seconds <= self.longest_step), points[-1][0])

    def _in_time(
        self, timeline: _Timeline, works: Sequence[Work]
    ) -> tuple[list[tuple[Work, int]], list[Work]]:
        """Return works that can all be in time, with the degree of their next step, the least slack
        first; and the other works.
        """
        heap: list[tuple[float, int]] = []
        remaining: list[Work] = []
        demand = 0.0
        chosen: dict[int, tuple[Work, int, float]] = {}
        ordered = sorted(
            (work for work in works if work.ticket.due is not None), key=lambda w: w.ticket.due or 0
        )
        remaining += [work for work in works if work.ticket.due is None]
        for number, work in enumerate(ordered):
            seconds, steps = timeline.seconds(work), work.remaining
            start = timeline.now
            if work.until is not None:
                start, steps = work.until, steps - work.running_steps
            slack = (work.ticket.due or 0.0) - start
            if not steps:
                continue
            shares = allocate(seconds, steps, slack)
            if not shares:
                remaining.append(work)
                continue
            needs = device_seconds(seconds, shares)
            demand += needs
            heapq.heappush(heap, (-needs, number))
            chosen[number] = (work, shares[0].degree, slack - steps * min(seconds))
            while demand > timeline.living * ((work.ticket.due or 0.0) - timeline.now):
                most, dropped = heapq.heappop(heap)
                demand += most
                remaining.append(chosen.pop(dropped)[0])
        on_time = sorted(chosen.values(), key=lambda option: option[2])
        return [(work, degree) for work, degree, _ in on_time], remaining

    def _scale_up(
        self, timeline: _Timeline, chosen: list[tuple[Work, int]]
    ) -> list[tuple[Work, int]]:
        """Give the devices that are left to works that save most time at twice their degree."""
        free_devices = timeline.living
        degrees = []
        for _, degree in chosen:
            degrees.append(degree if degree <= free_devices else 0)
            free_devices -= degrees[-1]
        while free_devices:
            best, best_gain = -1, 0.0
            for index, (work, _) in enumerate(chosen):
                degree = degrees[index]
                if 0 < degree <= free_devices and 2 * degree <= timeline.most:
                    seconds, at = work.ticket.seconds, degree.bit_length() - 1
                    gain = work.remaining * (seconds[at] - seconds[at + 1])
                    if gain > best_gain:
                        best, best_gain = index, gain
            if best < 0:
                break
            free_devices -= degrees[best]
            degrees[best] *= 2
        return [(work, degree) for (work, _), degree in zip(chosen, degrees, strict=True) if degree]


class _Timeline:
    """Devices while one decision is made, as bit masks.

    Args:
        now: seconds of the caller's clock.
        works: all edits with steps left.
    """

    def __init__(self, now: float, works: Sequence[Work], devices: int) -> None:
        self.now, self.devices = now, devices
        self.runs: list[Run] = []
        ends = [(work.until, work.gang) for work in works if work.until is not None]
        self.busy = sum({gang for _, gang in ends})  # rows of one step have the same
        lost = sum({gang for end, gang in ends if end == math.inf})
        self.claimed = lost
        """Devices given to works, or claimed by works that wait for them."""
        self.living = devices - lost.bit_count()
        self.most = max(1, largest_gang(devices, lost))
        """Size of the largest gang without a lost device."""
        self._soonest = min((end for end, _ in ends), default=math.inf)
        """Time when the first running step ends."""

    @property
    def idle(self) -> int:
        return ((1 << self.devices) - 1) & ~self.busy

    def seconds(self, work: Work) -> tuple[float, ...]:
        """Return a step's seconds by the degrees that are possible on these devices."""
        return work.ticket.seconds[: self.most.bit_length()]

    def place(self, work: Work, degree: int, excluded: int = 0) -> None:
        """Begin a step, or claim the devices that it waits for. A smaller degree is taken if there
        is no gang of `degree` devices; `excluded` devices are not waited for.
        """
        current_gang = work.gang if work.until is not None else 0
        excluded, busy, block = self.claimed | excluded, self.busy & ~current_gang, 0
        for fewer, _ in self._degrees(work, degree):
            block = block or choose_block(fewer, self.devices, excluded, work.gang, busy)
        self.claimed |= block
        if block and work.until is None and not block & self.busy:
            self._begin(work, block)

    def fill(self, works: Sequence[Work]) -> None:
        """Let no device idle: unclaimed devices go to waiting works, claimed ones to works whose
        step ends before any running step. The first of `works` is served first.
        """
        begun = {run.rows[0].request_id for run in self.runs}
        for work in works:
            if not self.idle:
                return
            if work.until is not None or work.ticket.request_id in begun:
                continue
            for degree, seconds in self._degrees(work, self.most):
                occupied = self.busy
                if self.now + seconds > self._soonest:
                    occupied |= self.claimed
                block = choose_block(degree, self.devices, occupied, work.gang)
                if block:
                    self._begin(work, block)
                    break

    def _degrees(self, work: Work, most: int) -> Iterator[tuple[int, float]]:
        """Return (degree, seconds of a step), the largest first, without useless degrees."""
        times = work.ticket.seconds[: most.bit_length()]
        for at in reversed(range(len(times))):
            if not at or times[at] < times[at - 1]:
                yield 1 << at, times[at]

    def begun(self, work: Work) -> Work:
        """Return a work whose step has just begun, as later decisions see it."""
        (devices,) = [run.devices for run in self.runs if run.rows == (work.ticket,)]
        ends_at = self.now + work.ticket.seconds[len(devices).bit_length() - 1]
        gang = sum(1 << device for device in devices)
        return replace(work, gang=gang, until=ends_at, running_steps=1)

    def _begin(self, work: Work, block: int) -> None:
        self.runs.append(Run((work.ticket,), devices_of(block)))
        self.busy |= block
        self.claimed |= block
        seconds = work.ticket.seconds[block.bit_count().bit_length() - 1]
        self._soonest = min(self._soonest, self.now + seconds)


def _delays_none(
    begun: Sequence[float] | None, planned: Sequence[float] | None, first: Container[int]
) -> bool:
    """Whether all works that wait for devices still get them on time, and none is late."""
    if begun is None or planned is None:
        return False
    pairs = enumerate(zip(begun, planned, strict=True))
    return all(
        start <= planned_start for number, (start, planned_start) in pairs if number not in first
    )


def _cheapest(work: Work) -> tuple[float, float]:
    points = frontier(work.ticket.seconds)
    return (work.remaining * points[0][0] * points[0][1], work.ticket.arrival)
