"""A policy for gangs in the engine's form: tickets in, runs out (`SchedulingPolicy`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from maskserve_common.shares import KeyWork
from maskserve_engine.scheduling.gangs.work import GangPolicy, Work, age_order, seconds_together
from maskserve_engine.scheduling.step_scheduler import (
    ALL_FREE,
    Decision,
    Devices,
    Run,
    Ticket,
    TicketQueue,
    id_in_use,
)

_UNKNOWN_S = 0.05
"""Assumed seconds of a step without a prediction."""
_MOST_BEHIND_S = 2.0
"""Device-seconds that a key may fall behind another before it goes first."""
_SOON_S = 1.0
"""Seconds after which a device counts as free whose edit was withdrawn in its step."""


@dataclass(slots=True)
class _ActiveRun:
    run: Run
    left: int
    """Steps that have not begun."""


class GangScheduler:
    """Keeps the state that a `GangPolicy` decides over.

    Tickets wait in the order of `TicketQueue`; as many as there are rows take part in decisions.
    Devices that are lost, or whose edit was withdrawn in its step, count as busy with a foreign
    edit. No key falls behind another by more than `_MOST_BEHIND_S`: it is then next, whatever the
    policy decides (`Work.first`).

    Args:
        policy: policy that decides.
        max_rows: rows of each device.
        max_waiting: tickets that may wait.
    """

    def __init__(self, policy: GangPolicy, devices: int, max_rows: int, max_waiting: int) -> None:
        self.policy = policy
        self._devices, self._max_works = devices, devices * max_rows
        self._waiting = TicketQueue(max_waiting)
        self._works: dict[str, Work] = {}
        self._running: list[_ActiveRun] = []
        self._used_by_key = KeyWork()
        """Device-seconds by key."""

    @property
    def running(self) -> tuple[Ticket, ...]:
        return tuple([work.ticket for work in self._works.values()])

    @property
    def waiting(self) -> tuple[Ticket, ...]:
        return tuple(self._waiting)

    def __len__(self) -> int:
        return len(self._works) + len(self._waiting.turns)

    def submit(self, ticket: Ticket) -> None:
        name = ticket.request_id
        if name in self._works or name in self._waiting.turns:
            raise id_in_use(name)
        self._waiting.check_room(ticket)
        self._waiting.add(replace(ticket, seconds=self._of_all_degrees(ticket.seconds)))

    def cancel(self, request_id: str) -> Ticket | None:
        if request_id not in self._works:
            return self._waiting.discard(request_id)
        ticket = self._works[request_id].ticket
        self.finish(request_id)
        return ticket

    def finish(self, request_id: str) -> None:
        self._waiting.free(self._works.pop(request_id).ticket)

    def reprice(self, ticket: Ticket, fewer: int = 0) -> None:
        work = self._works[ticket.request_id]
        ticket = replace(ticket, seconds=self._of_all_degrees(ticket.seconds))
        before, work.ticket = work.ticket, work.ticket.repriced(ticket, fewer)
        work.remaining -= fewer
        for active_run in self._running:
            rows = [work.ticket if row is before else row for row in active_run.run.rows]
            active_run.run = replace(active_run.run, rows=tuple(rows))

    def schedule(self, now: float, devices: Devices = ALL_FREE) -> Decision:
        """Account for steps that have ended, and decide for idle devices."""
        continuing = self._book(now, devices)
        expired = [
            ticket
            for ticket in (*self.running, *self.waiting)
            if ticket.deadline is not None and ticket.deadline <= now
        ]
        for ticket in expired:
            self.cancel(ticket.request_id)
        used_rows = sum(work.ticket.rows for work in self._works.values())
        admitted = self._waiting.admit(self._max_works - used_rows, alone=not self._works)
        for ticket in admitted:
            self._works[ticket.request_id] = Work(ticket, ticket.steps, ticket.arrival)
        runs = [
            self._begin(active_run, now)
            for active_run in continuing
            if self._has_rows(active_run.run)
        ]
        self._let_keys_catch_up()
        works = [*self._works.values(), *self._foreign_works(now, devices)]
        plan = self.policy.decide(now, works)
        for run in plan.runs:
            begun = _ActiveRun(run, run.steps)
            self._running.append(begun)
            runs.append(self._begin(begun, now))
        return Decision(tuple(admitted), tuple(runs), tuple(expired), plan.next_decision)

    def _let_keys_catch_up(self) -> None:
        """Mark the most urgent edit of the key that is furthest behind (`Work.first`)."""
        idle: dict[str, list[Work]] = {}
        for work in self._works.values():
            work.first = False
            idle_works = idle.setdefault(work.ticket.key, [])
            if work.until is None:
                idle_works.append(work)
        waiting = [key for key, idle_works in idle.items() if idle_works]
        if len(idle) < 2 or not waiting:
            return
        behind = self._used_by_key.furthest_behind(waiting)
        if self._used_by_key.lag(behind, idle) > _MOST_BEHIND_S:
            min(idle[behind], key=lambda work: age_order(work.ticket)).first = True

    def check_integrity(self) -> None:
        if not self._waiting.check_integrity():
            raise RuntimeError("places and tickets that wait do not match")
        occupied = 0
        for active_run in self._running:
            gang = _mask(active_run.run.devices)
            if gang & occupied or gang >> self._devices:
                raise RuntimeError(
                    f"devices {active_run.run.devices} were given twice or are not there"
                )
            occupied |= gang
        for work in self._works.values():
            if work.remaining < 1:
                raise RuntimeError(f"{work.ticket.request_id} has no steps left and was not ended")

    def _of_all_degrees(self, seconds: tuple[float, ...]) -> tuple[float, ...]:
        """Return seconds for all degrees; beyond those that an edit may have, it is no faster."""
        step_times = seconds or (_UNKNOWN_S,)
        return step_times + step_times[-1:] * (self._devices.bit_length() - len(step_times))

    def _has_rows(self, run: Run) -> bool:
        """Whether an edit of the run has not ended."""
        return any(self._has(ticket) for ticket in run.rows)

    def _has(self, ticket: Ticket) -> bool:
        """Whether the edit has not ended; another one may have its id by now."""
        work = self._works.get(ticket.request_id)
        return work is not None and work.ticket is ticket

    def _book(self, now: float, devices: Devices) -> list[_ActiveRun]:
        """Account for steps that have ended; return the runs with steps left."""
        ended = [e for e in self._running if devices.busy.isdisjoint(e.run.devices)]
        continuing = []
        for active_run in ended:
            lost = not devices.lost.isdisjoint(active_run.run.devices)
            active_run.left = 0 if lost else active_run.left
            for ticket in filter(self._has, active_run.run.rows):
                work = self._works[ticket.request_id]
                work.until, work.running_steps, work.idle_since = None, 0, now
                if not lost:  # what has none left was finished by now
                    work.remaining = max(1, work.remaining - 1)
            if active_run.left and self._has_rows(active_run.run):
                continuing.append(active_run)
            else:
                self._running.remove(active_run)
        return continuing

    def _begin(self, active_run: _ActiveRun, now: float) -> Run:
        rows = tuple(filter(self._has, active_run.run.rows))
        lasts = seconds_together(rows, len(active_run.run.devices))
        for ticket in rows:
            work = self._works[ticket.request_id]
            work.gang, work.running_steps = _mask(active_run.run.devices), active_run.left
            work.until = now + active_run.left * lasts
            took = len(active_run.run.devices) * lasts / len(rows)
            self._used_by_key.add(ticket.key, took)
        active_run.left -= 1
        return Run(rows, active_run.run.devices)

    def _foreign_works(self, now: float, devices: Devices) -> list[Work]:
        """Return works that stand for devices without an edit of ours; nothing waits for lost
        devices.
        """
        our_devices = {
            device
            for active_run in self._running
            if self._has_rows(active_run.run)
            for device in active_run.run.devices
        }
        return [
            Work(
                Ticket(f"device {device}", 1, 0, 0, now, seconds=self._of_all_degrees((_SOON_S,))),
                remaining=1,
                idle_since=now,
                gang=1 << device,
                until=math.inf if device in devices.lost else now + _SOON_S,
                running_steps=1,
            )
            for device in sorted((devices.busy | devices.lost) - our_devices)
        ]


def _mask(devices: tuple[int, ...]) -> int:
    return sum(1 << device for device in devices)
