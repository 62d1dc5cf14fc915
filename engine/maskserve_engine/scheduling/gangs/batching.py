"""Rows of several edits in one step of a gang, if no edit misses its due time by it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from maskserve_engine.scheduling.gangs.work import GangPlan, GangPolicy, Work
from maskserve_engine.scheduling.step_scheduler import Run, Ticket


class Batching:
    """A `GangPolicy` around another one: an edit without devices may join a step that the other
    policy begins.

    Rows of one step share its fixed cost (`Ticket.shared`). An edit joins only if that cost is much
    of its own step, as for small edits, and if

    - no edit of the run becomes late that would be in time if they shared all their steps,
    - no waiting edit becomes late that could be in time behind the run without the edit,
    - a run of several steps (a round's) still ends before the other policy decides again: the edit
      takes only time in which the devices would idle.

    Args:
        policy: the other policy.
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
            _Joined(run, [by_id[ticket.request_id] for ticket in run.rows], now, plan.next_decision)
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
    """Return the indices in `Ticket.seconds` at which an edit saves enough by joining a step: it
    may have so many devices, and gains by them.
    """
    return frozenset(
        at
        for at, step_s in enumerate(seconds)
        if shared >= least * step_s and (not at or step_s < seconds[at - 1])
    )


class _Joined:
    """A run while edits join it.

    Args:
        run: run that the other policy has chosen.
        works: works of its rows.
        now: seconds of the caller's clock.
        next_decision: time at which the other policy decides again.
    """

    def __init__(self, run: Run, works: Sequence[Work], now: float, next_decision: float) -> None:
        self.run, self._now, self._next_decision = run, now, next_decision
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
        """Let an edit join if no other edit becomes late by it.

        Args:
            work: work that waits.
            latest: times when the waiting works must begin, `work` among them; in order.
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
        if run.steps > 1 and (work.remaining < run.steps or joined_end > self._next_decision):
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
    """Return when it must begin to be in time, on all devices from then on."""
    due_at = work.ticket.due
    return -math.inf if due_at is None else due_at - work.remaining * min(work.ticket.seconds)
