"""Rows spread over the devices of a worker: each device has its own batch, and a row stays on its
device, since its entries are there.
"""

from __future__ import annotations

from collections import Counter

from maskserve_engine.scheduling.step_scheduler import (
    ALL_FREE,
    Decision,
    Devices,
    Run,
    StepScheduler,
    Ticket,
    id_in_use,
)


class Spread:
    """A `StepScheduler` per device (`SchedulingPolicy`).

    A ticket goes to the device with the least tokens to compute; ties go to the lowest number. A
    ticket that waits for a row goes to a device with a free one. If a device is lost, its tickets
    go to the others as new ones do, but queue by their arrival; without any device they stay.

    Args:
        max_rows: rows of each device's batch.
        max_waiting: tickets that may wait for each device, per class.
        priming_share: largest share of work that priming may add (see `StepScheduler`).
        static: whether batches are static (see `StepScheduler`).
    """

    def __init__(
        self,
        devices: int,
        max_rows: int,
        max_waiting: int,
        priming_share: float,
        *,
        static: bool = False,
    ) -> None:
        self._schedulers = [
            StepScheduler(max_rows, max_waiting, priming_share, static=static)
            for _ in range(devices)
        ]
        self._device: dict[str, int] = {}
        """Device of each ticket."""
        self._steps_taken: Counter[str] = Counter()
        """Steps taken by each device."""
        self._lost: frozenset[int] = frozenset()

    @property
    def running(self) -> tuple[Ticket, ...]:
        return tuple([ticket for scheduler in self._schedulers for ticket in scheduler.running])

    @property
    def waiting(self) -> tuple[Ticket, ...]:
        return tuple([ticket for scheduler in self._schedulers for ticket in scheduler.waiting])

    def __len__(self) -> int:
        return len(self._device)

    def submit(self, ticket: Ticket) -> None:
        if ticket.request_id in self._device:
            raise id_in_use(ticket.request_id)
        device = min(self._left() or range(len(self._schedulers)), key=self._load)
        self._schedulers[device].submit(ticket)
        self._device[ticket.request_id] = device

    def cancel(self, request_id: str) -> Ticket | None:
        device = self._device.pop(request_id, None)
        del self._steps_taken[request_id]
        return None if device is None else self._schedulers[device].cancel(request_id)

    def finish(self, request_id: str) -> None:
        self._schedulers[self._device[request_id]].finish(request_id)
        del self._device[request_id], self._steps_taken[request_id]

    def reprice(self, ticket: Ticket, fewer: int = 0) -> None:
        self._schedulers[self._device[ticket.request_id]].reprice(ticket, fewer)

    def schedule(self, now: float, devices: Devices = ALL_FREE) -> Decision:
        """Decide for each device alone, as soon as its step has ended."""
        self._lost = devices.lost
        for device in devices.lost:
            self._move_from(device)
        admitted: list[Ticket] = []
        runs: list[Run] = []
        expired: list[Ticket] = []
        for device, scheduler in enumerate(self._schedulers):
            if device in devices.busy or device in devices.lost:
                continue
            self._fill(device)
            decision = scheduler.schedule(now)
            admitted += decision.admitted
            expired += decision.expired
            for run in decision.runs:
                runs.append(Run(run.rows, (device,), run.steps))
                self._steps_taken.update({ticket.request_id: run.steps for ticket in run.rows})
        for ticket in expired:
            del self._device[ticket.request_id], self._steps_taken[ticket.request_id]
        return Decision(tuple(admitted), tuple(runs), tuple(expired))

    def check_integrity(self) -> None:
        for device, scheduler in enumerate(self._schedulers):
            scheduler.check_integrity()
            for ticket in (*scheduler.running, *scheduler.waiting):
                if self._device.get(ticket.request_id) != device:
                    raise RuntimeError(f"{ticket.request_id} is not known to be on {device}")
        if sum(map(len, self._schedulers)) != len(self._device):
            raise RuntimeError("a ticket is on no device")

    def _left(self) -> list[int]:
        return [device for device in range(len(self._schedulers)) if device not in self._lost]

    def _load(self, device: int) -> int:
        """Return the tokens left to compute on a device, as its tickets state them."""
        scheduler = self._schedulers[device]
        return sum(
            (t.steps - self._steps_taken[t.request_id]) * t.active_tokens
            for t in (*scheduler.running, *scheduler.waiting)
        )

    def _fill(self, device: int) -> None:
        """Give a device's free rows to tickets that wait for other devices."""
        scheduler = self._schedulers[device]
        while len(scheduler) < scheduler.max_rows:
            longest = max(self._schedulers, key=len)
            if len(longest) <= longest.max_rows or not longest.waiting:
                return
            self._move(longest, longest.waiting[0], device)

    def _move(self, source: StepScheduler, ticket: Ticket, device: int) -> None:
        source.cancel(ticket.request_id)
        self._schedulers[device].take(ticket)
        self._device[ticket.request_id] = device

    def _move_from(self, device: int) -> None:
        scheduler, living = self._schedulers[device], self._left()
        if not living:
            return
        for ticket in (*scheduler.running, *scheduler.waiting):
            self._move(scheduler, ticket, min(living, key=self._load))
