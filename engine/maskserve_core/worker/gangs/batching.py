"""Rows of several edits in one step of a gang, where no due time suffers by it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from maskserve_core.worker.gangs.work import GangPlan, GangPolicy, Work, seconds_together
from maskserve_core.worker.step_scheduler import Run, Ticket


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
        max_rows: of a step.
        least: of an edit's step, the share that it has to save.
    """

    def __init__(self, policy: GangPolicy, max_rows: int, least: float = 0.2) -> None:
        self.policy, self.max_rows, self.least = policy, max_rows, least

    def decide(self, now: float, works: Sequence[Work]) -> GangPlan:
        plan = self.policy.decide(now, works)
        by_id = {work.ticket.request_id: work for work in works}
        begun = {ticket.request_id for run in plan.runs for ticket in run.rows}
        waiting = [w for w in works if w.until is None and w.ticket.request_id not in begun]
        runs = list(plan.runs)
        latest = sorted(map(_latest, waiting))
        for work in sorted(waiting, key=lambda work: (work.ticket.arrival, work.ticket.request_id)):
            for number, run in enumerate(runs):
                if not self._may_join(work, run):
                    continue
                rows = [by_id[ticket.request_id] for ticket in run.rows]
                if _all_in_time(work, rows, run, latest, now, plan.again):
                    runs[number] = replace(run, rows=(*run.rows, work.ticket))
                    latest.remove(_latest(work))
                    break
        return replace(plan, runs=tuple(runs))

    def _may_join(self, work: Work, run: Run) -> bool:
        """Whether there is something to gain, whoever is late by it."""
        ticket, degree = work.ticket, len(run.devices)
        own = _seconds(ticket, degree)
        if len(run.rows) >= self.max_rows or ticket.shared < self.least * own:
            return False
        if any(row.batch_key != ticket.batch_key for row in run.rows):
            return False
        # It may have so many devices, and gains by them.
        return degree == 1 or own < _seconds(ticket, degree // 2)


def _all_in_time(
    work: Work, rows: Sequence[Work], run: Run, latest: Sequence[float], now: float, again: float
) -> bool:
    """Whether nobody is late by it who would not be without.

    Args:
        work: that would join.
        rows: of the run, so far.
        run: the run.
        latest: when those must begin that wait, `work` among them; in order.
        now: seconds of the caller's clock.
        again: when the other policy decides again.
    """
    degree, tickets = len(run.devices), [row.ticket for row in rows]
    before = seconds_together(tickets, degree)
    after = seconds_together([*tickets, work.ticket], degree)
    behind, then = now + run.steps * before, now + run.steps * after
    if run.steps > 1 and (work.remaining < run.steps or then > again):
        return False
    lost = bisect_left(latest, then) - bisect_left(latest, behind)
    if lost - (behind <= _latest(work) < then):
        return False
    return all(
        now + row.remaining * after <= row.ticket.due
        for row in rows
        if row.ticket.due is not None and now + row.remaining * before <= row.ticket.due
    )


def _seconds(ticket: Ticket, degree: int) -> float:
    return ticket.seconds[degree.bit_length() - 1]


def _latest(work: Work) -> float:
    """When it must begin to be in time, on all devices from then on."""
    due = work.ticket.due
    return -math.inf if due is None else due - work.remaining * min(work.ticket.seconds)
