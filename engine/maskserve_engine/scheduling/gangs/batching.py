"""Rows of several edits in one step of a gang, where no due time suffers by it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from maskserve_engine.scheduling.gangs.work import GangPlan, GangPolicy, Work
from maskserve_engine.scheduling.step_scheduler import Run, Ticket


class Batching:
    """A `GangPolicy` around another: an edit that this leaves without devices joins a step that it
    begins.

    Rows of one step pay once for what it costs whatever its rows (`Ticket.shared`). An edit joins
    only if that is much of its own step, as it is of small ones, and if

    - no edit of the run is late that would be in time, were they to share all their steps,
    - no edit that still waits is late that could be in time behind the run as it was,
    - a run of several steps, a round's, still ends when the other policy decides again: it takes
      only time in which its devices would idle.

    Args:
        policy: the other.
        least: least share of its step that an edit must save.
    """

    def __init__(self, policy: GangPolicy, max_rows: int, least: float = 0.2) -> None:
        self.policy, self.max_rows, self.least = policy, max_rows, least

    def decide(self, now: float, works: Sequence[Work]) -> GangPlan:
        plan = self.policy.decide(now, works)
        by_id = {work.ticket.request_id: work for work in works}
        begun = {ticket.request_id for run in plan.runs for ticket in run.rows}
        waiting = [w for w in works if w.until is None and w.ticket.request_id not in begun]
        if not waiting:
            return plan
        joined = [
            _Joined(run, [by_id[ticket.request_id] for ticket in run.rows], now, plan.again)
            for run in plan.runs
        ]
        latest = sorted(map(_latest, waiting))
        for work in sorted(waiting, key=lambda work: (work.ticket.arrival, work.ticket.request_id)):
            ticket = work.ticket
            gains = _gains(ticket.seconds, ticket.shared, self.least)
            for run in joined if gains else ():
                if run.at in gains and self._has_room(run.run, ticket) and run.takes(work, latest):
                    latest.remove(_latest(work))
                    break
        return replace(plan, runs=tuple([joined_run.run for joined_run in joined]))

    def _has_room(self, run: Run, ticket: Ticket) -> bool:
        return len(run.rows) < self.max_rows and all(
            row.batch_key == ticket.batch_key for row in run.rows
        )


@lru_cache(maxsize=4096)
def _gains(seconds: tuple[float, ...], shared: float, least: float) -> frozenset[int]:
    """Where in `Ticket.seconds` an edit saves enough by joining a step: it may have so many
    devices, and gains by them.
    """
    return frozenset(
        at
        for at, step_s in enumerate(seconds)
        if shared >= least * step_s and (not at or step_s < seconds[at - 1])
    )


class _Joined:
    """A run, and what has to be known of it as edits join.

    Args:
        run: run that the other policy has chosen.
        works: the edits of its rows.
        now: seconds of the caller's clock.
        again: when the other policy decides again.
    """

    def __init__(self, run: Run, works: Sequence[Work], now: float, again: float) -> None:
        self.run, self._now, self._again = run, now, again
        degree = len(run.devices)
        self.at = degree.bit_length() - 1
        """Index of its degree in `Ticket.seconds`."""
        self._seconds_of_rows = sum(
            [ticket.seconds[self.at] - ticket.shared for ticket in run.rows]
        )
        self._shared = max([ticket.shared for ticket in run.rows])
        self._in_time = [
            (work.remaining, due_at)
            for work in works
            if (due_at := work.ticket.due) is not None
            and now + work.remaining * (self._seconds_of_rows + self._shared) <= due_at
        ]
        """Steps left and due times of the edits that are in time now."""

    def takes(self, work: Work, latest: Sequence[float]) -> bool:
        """Have an edit join if nobody is late by it who would not be without.

        Args:
            work: work that waits.
            latest: when those must begin that wait, `work` among them; in order.
        """
        ticket, run, now_s = work.ticket, self.run, self._now
        row_seconds, shared = (
            self._seconds_of_rows + ticket.seconds[self.at] - ticket.shared,
            self._shared,
        )
        current_s, joined_s = (
            self._seconds_of_rows + shared,
            row_seconds + max(shared, ticket.shared),
        )
        current_end, joined_end = now_s + run.steps * current_s, now_s + run.steps * joined_s
        if run.steps > 1 and (work.remaining < run.steps or joined_end > self._again):
            return False
        if any(now_s + steps * joined_s > due_at for steps, due_at in self._in_time):
            return False
        lost = bisect_left(latest, joined_end) - bisect_left(latest, current_end)
        if lost - (current_end <= _latest(work) < joined_end):
            return False
        self.run = replace(run, rows=(*run.rows, ticket))
        self._seconds_of_rows, self._shared = row_seconds, max(shared, ticket.shared)
        if ticket.due is not None and now_s + work.remaining * joined_s <= ticket.due:
            self._in_time.append((work.remaining, ticket.due))
        return True


def _latest(work: Work) -> float:
    """When it must begin to be in time, on all devices from then on."""
    due_at = work.ticket.due
    return -math.inf if due_at is None else due_at - work.remaining * min(work.ticket.seconds)
