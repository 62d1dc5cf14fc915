"""A gang policy for tests: at each step an edit may use any number of idle devices."""

from __future__ import annotations

import random
from collections.abc import Sequence

from maskserve_engine.scheduling.gangs.scheduler import GangScheduler
from maskserve_engine.scheduling.gangs.work import GangPlan, Work
from maskserve_engine.scheduling.step_scheduler import Run


def gangs_of(devices: int) -> list[tuple[int, ...]]:
    """All aligned blocks of 1, 2, 4 and 8 devices, the largest first."""
    degrees = [degree for degree in (8, 4, 2, 1) if degree <= devices]
    return [tuple(range(first, first + degree))
            for degree in degrees for first in range(0, devices, degree)]  # fmt: skip


class AnyDegree:
    """A `GangPolicy` that draws new gangs for each step."""

    def __init__(self, devices: int) -> None:
        self._rng, self._devices = random.Random(5), devices
        self.drawn: set[tuple[int, ...]] = set()
        self.always: tuple[int, ...] = ()
        """The gang of every step; empty: a random gang."""

    def decide(self, now: float, works: Sequence[Work]) -> GangPlan:
        busy = sum(work.gang for work in works if work.until is not None)
        idle = [work for work in works if work.until is None]
        if self.always:
            return GangPlan((Run((idle[0].ticket,), self.always),) if idle and not busy else ())
        self._rng.shuffle(idle)
        runs = []
        for _ in range(self._devices):
            if busy and self._rng.random() < 0.5:
                break  # leaves devices for a larger gang later
            free = [
                gang
                for gang in gangs_of(self._devices)
                if not busy & sum(1 << device for device in gang)
            ]
            if idle and free:
                new = [gang for gang in free if gang not in self.drawn]
                gang = self._rng.choice(new or free)  # every gang comes, even with few steps
                busy |= sum(1 << device for device in gang)
                runs.append(Run((idle.pop().ticket,), gang))
                self.drawn.add(gang)
        return GangPlan(tuple(runs))


class AnyDegreeScheduler(GangScheduler):
    def __init__(self, devices: int, max_rows: int, max_waiting: int) -> None:
        self.draws = AnyDegree(devices)
        super().__init__(self.draws, devices, max_rows, max_waiting)
