"""The policy of servers without a scheduler of gangs: an edit keeps one degree from its first step
to its last, first come, first served.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from maskserve_engine.scheduling.gangs.work import (
    GangPlan,
    Work,
    choose_block,
    devices_of,
    largest_gang,
)
from maskserve_engine.scheduling.step_scheduler import Run, Ticket


class Fixed:
    """No edit overtakes another, except one whose key is next (`Work.first`). Where lost devices
    leave no gang of the degree, the largest one that is left takes its place.

    Args:
        devices: number of the worker's devices.
        degree: number of devices of each edit.
    """

    def __init__(self, devices: int, degree: int) -> None:
        self.devices, self.degree = devices, degree

    def decide(self, now: float, works: Sequence[Work]) -> GangPlan:
        busy = lost = 0
        for work in works:
            if work.until is not None:
                busy |= work.gang
                lost |= work.gang if work.until == math.inf else 0
        most, runs = largest_gang(self.devices, lost), list[Run]()
        idle = [work for work in works if work.until is None]
        for work in sorted(idle, key=lambda work: (not work.first, *self.turn(work, now))):
            degree = min(self.degree_of(work.ticket), most)
            block = degree and choose_block(degree, self.devices, busy, 0)
            if not block:
                break
            busy |= block
            runs.append(Run((work.ticket,), devices_of(block), work.remaining))
        return GangPlan(tuple(runs))

    def degree_of(self, ticket: Ticket) -> int:
        return self.degree

    def turn(self, work: Work, now: float) -> tuple[float, ...]:
        """Return the place of a work in the order, the lowest first."""
        return (work.ticket.arrival,)
