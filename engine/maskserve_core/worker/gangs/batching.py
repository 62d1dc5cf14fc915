"""Rows of several edits in one step of a gang, where no due time suffers by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        for work in sorted(waiting, key=lambda work: (work.ticket.arrival, work.ticket.request_id)):
            others = [each for each in waiting if each is not work]
            for number, run in enumerate(runs):
                rows = [by_id[ticket.request_id] for ticket in run.rows]
                if self._joins(work, rows, run, others, now, plan.again):
                    runs[number] = replace(run, rows=(*run.rows, work.ticket))
                    waiting = others
                    break
        return replace(plan, runs=tuple(runs))

    def _joins(
        self,
        work: Work,
        rows: Sequence[Work],
        run: Run,
        others: Iterable[Work],
        now: float,
        again: float,
    ) -> bool:
        ticket, degree = work.ticket, len(run.devices)
        own = _seconds(ticket, degree)
        if len(rows) >= self.max_rows or ticket.shared < self.least * own:
            return False
        if any(row.ticket.batch_key != ticket.batch_key for row in rows):
            return False
        if degree > 1 and own >= _seconds(ticket, degree // 2):
            return False  # it may not have so many, or gains nothing
        tickets = [row.ticket for row in rows]
        before = seconds_together(tickets, degree)
        after = seconds_together([*tickets, ticket], degree)
        if run.steps > 1 and (work.remaining < run.steps or now + run.steps * after > again):
            return False
        ends = all(
            now + row.remaining * after <= row.ticket.due
            for row in rows
            if row.ticket.due is not None and now + row.remaining * before <= row.ticket.due
        )
        return ends and all(
            _in_time(each, now + run.steps * after)
            for each in others
            if _in_time(each, now + run.steps * before)
        )


def _seconds(ticket: Ticket, degree: int) -> float:
    return ticket.seconds[degree.bit_length() - 1]


def _in_time(work: Work, begin: float) -> bool:
    """Whether it could be, on all devices from then on."""
    due = work.ticket.due
    return due is not None and begin + work.remaining * min(work.ticket.seconds) <= due
