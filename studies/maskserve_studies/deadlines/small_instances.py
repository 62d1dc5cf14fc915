"""Small instances of edits with due times, and the best that any schedule of them can do."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from maskserve_engine.scheduling.step_scheduler import Ticket
from maskserve_studies.deadlines.gangs import SIZES

_STEPS = 50


def small_instance(times: dict[int, tuple[float, ...]], seed: int) -> list[Ticket]:
    """Return four edits of three long steps that all arrive at once, for four devices."""
    rng = random.Random(seed)
    edits = []
    for number in range(4):
        side = rng.choice(SIZES)
        seconds = tuple(_STEPS / 3 * t for t in times[side][:3])
        due_time = 3 * min(seconds) * rng.uniform(1.0, 3.0)
        edits.append(Ticket(f"{side}-{number}", 3, 1, 1, 0.0, due=due_time, seconds=seconds))
    return edits


def optimum(tickets: Sequence[Ticket], devices: int) -> int:
    """Return the largest number of edits that any schedule completes in time, with all arrivals
    known; gangs need not be aligned. The search starts edits only at arrivals and step ends,
    because every schedule can be moved to earlier times until that holds.
    """
    for count in range(len(tickets), 0, -1):
        if any(_feasible(among, devices) for among in itertools.combinations(tickets, count)):
            return count
    return 0


def _feasible(tickets: Sequence[Ticket], devices: int) -> bool:
    visited: set[object] = set()

    def go(now: float, left: tuple[int, ...], running: tuple[tuple[float, int], ...]) -> bool:
        if all(n == 0 for n in left) and all(end <= now for end, _ in running):
            return True
        for ticket, n, (end, _) in zip(tickets, left, running, strict=True):
            start = max(now, end, ticket.arrival) if n else end
            if start + n * min(ticket.seconds) > (ticket.due or 0.0) + 1e-9:
                return False
        state = (round(now, 9), left, running)
        if state in visited:
            return False
        visited.add(state)
        free = devices - sum(k for end, k in running if end > now + 1e-12)
        for index, (ticket, n, (end, _)) in enumerate(zip(tickets, left, running, strict=True)):
            if n and end <= now + 1e-12 and ticket.arrival <= now + 1e-12:
                for at, seconds in enumerate(ticket.seconds):
                    if 1 << at <= free:
                        fewer = (*left[:index], n - 1, *left[index + 1 :])
                        ran = (*running[:index], (now + seconds, 1 << at), *running[index + 1 :])
                        if go(now, fewer, ran):
                            return True
        later = [end for end, _ in running if end > now + 1e-12]
        later += [t.arrival for t in tickets if t.arrival > now + 1e-12]
        return bool(later) and go(min(later), left, running)

    return go(0.0, tuple(t.steps for t in tickets), ((0.0, 0),) * len(tickets))
