"""The policy for due times on many random instances: what it starts, and what it leaves lying."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest

from maskserve_engine.scheduling.gangs.deadline import Deadline
from maskserve_engine.scheduling.gangs.work import GangPlan, Work, blocks
from maskserve_engine.scheduling.step_scheduler import Ticket
from tests.support.draws import fresh_random

LOST = "device"
"""The name of what stands for a device that is lost."""


def seconds(rng: random.Random, degrees: int) -> tuple[float, ...]:
    """Seconds of a step by degree: gains that shrink, sometimes none, sometimes losses."""
    times = [10 ** rng.uniform(-2.0, 0.5)]
    while len(times) < degrees:
        times.append(times[-1] * rng.choice((1.0, rng.uniform(0.45, 1.05))))
    return tuple(times)


def edit(rng: random.Random, name: str, now: float, degrees: int) -> Work:
    """Some are due, of these some too soon, some never."""
    times, steps = seconds(rng, degrees), rng.randint(1, 12)
    due = None if rng.random() < 0.3 else now + steps * rng.choice(times) * rng.uniform(0.3, 4.0)
    return Work(Ticket(name, steps, 1, 1, now, due=due, seconds=times), steps, now)


def lost(device: int, now: float, degrees: int) -> Work:
    """As `GangScheduler` tells it."""
    ticket = Ticket(f"{LOST} {device}", 1, 0, 0, now, seconds=(1.0,) * degrees)
    return Work(ticket, 1, now, 1 << device, math.inf, 1)


def could_be_in_time(work: Work, now: float) -> bool:
    remaining, begin = work.remaining, now
    if work.until is not None:
        remaining, begin = remaining - work.running_steps, work.until
    due = work.ticket.due
    return (
        due is not None
        and remaining > 0
        and begin + remaining * min(work.ticket.seconds) <= due + 1e-9
    )


def check(plan: GangPlan, now: float, works: list[Work], devices: int) -> None:
    """Devices and edits are there, idle and taken once. A device is left idle beside an edit that
    waits only while another is under way, for the sake of one that can be in time, and only if the
    waiting one's step would outlast that.
    """
    waiting = {work.ticket.request_id: work for work in works if work.until is None}
    total = sum(work.gang for work in works if work.until is not None)
    ends = [work.until for work in works if work.until is not None and work.until < math.inf]
    for run in plan.runs:
        gang = sum(1 << device for device in run.devices)
        assert gang in blocks(len(run.devices), devices)
        assert not gang & total
        total |= gang
        (ticket,) = run.rows
        work = waiting.pop(ticket.request_id)
        times, at = ticket.seconds, len(run.devices).bit_length() - 1
        assert run.steps == 1 <= work.remaining
        assert at == 0 or times[at] < times[at - 1], "no faster on so many"
        ends.append(now + times[at])
    if total == (1 << devices) - 1 or not waiting:
        return
    assert ends, "all devices idle while edits wait"
    assert any(could_be_in_time(work, now) for work in works), "kept idle for nobody"
    for work in waiting.values():
        assert now + work.ticket.seconds[0] > min(ends), "its step would have delayed none"


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_no_device_idles_while_an_edit_could_run(devices: int) -> None:
    rng = fresh_random()
    degrees = devices.bit_length()
    for _ in range(1500):
        now, works, count = 100.0, list[Work](), 0
        for number in range(rng.choice((1, 2, 3, 4, 5, 6, 9, 20))):
            work = edit(rng, str(number), now - rng.uniform(0.0, 30.0), degrees)
            block = rng.choice(blocks(rng.choice([1 << n for n in range(degrees)]), devices))
            if rng.random() < 0.4 and not block & count:
                count |= block
                until = now + rng.uniform(-0.05, 1.0)  # some steps are overdue
                work = replace(work, gang=block, until=until, running_steps=1)
            works.append(work)
        for device in range(devices):
            if rng.random() < 0.1 and not count >> device & 1:
                works.append(lost(device, now, degrees))
        rng.shuffle(works)
        check(Deadline(devices).decide(now, works), now, works, devices)


@dataclass
class Trial:
    """A worker in virtual time, with devices that come and go and steps that last other than
    predicted.
    """

    rng: random.Random
    devices: int
    edits: int
    now: float = 0.0

    def run(self) -> tuple[dict[str, float], float]:
        """For how long each edit starved at most, and the longest step."""
        rng, policy = self.rng, Deadline(self.devices, patience=2.0)
        degrees, lost_devices = self.devices.bit_length(), set[int]()
        works, longest, longest_step = dict[str, Work](), dict[str, float](), 0.0
        ends, count = dict[str, float](), 0
        while count < self.edits or works:
            if count < self.edits and rng.random() < 0.4:
                works[str(count)] = edit(rng, str(count), self.now, degrees)
                count += 1
            if rng.random() < 0.05:
                busy = sum(work.gang for work in works.values() if work.until is not None)
                idle = [d for d in range(self.devices) if not busy >> d & 1]
                lost_devices = set(
                    rng.sample(idle, rng.randint(0, min(len(idle), self.devices - 1)))
                )
            all_works = [*works.values(), *(lost(d, self.now, degrees) for d in lost_devices)]
            plan = policy.decide(self.now, all_works)
            check(plan, self.now, all_works, self.devices)
            for run in plan.runs:
                work = works[run.rows[0].request_id]
                name, at = work.ticket.request_id, len(run.devices).bit_length() - 1
                longest[name] = max(longest.get(name, 0.0), self.now - self._starves_from(work))
                work.gang, work.running_steps = sum(1 << d for d in run.devices), 1
                work.until = self.now + work.ticket.seconds[at]
                ends[name] = self.now + work.ticket.seconds[at] * rng.uniform(0.7, 1.3)
                longest_step = max(longest_step, ends[name] - self.now)
            if not ends:
                self.now += 0.05
                continue
            name = min(ends, key=lambda key: ends[key])
            self.now = max(self.now, ends.pop(name))
            work = works[name]
            work.remaining, work.idle_since = work.remaining - 1, self.now
            work.until, work.running_steps = None, 0
            if not work.remaining:
                del works[name]
        return longest, longest_step

    def _starves_from(self, work: Work) -> float:
        """An edit that can still be in time waits for its turn."""
        due = work.ticket.due
        last = -math.inf if due is None else due - work.remaining * min(work.ticket.seconds)
        return max(work.idle_since, last)


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_every_edit_ends_and_none_waits_for_ever(devices: int) -> None:
    """An edit that waits is helped after `patience`, one per fifth of it or per step."""
    rng = fresh_random()
    for _ in range(20):
        edits = rng.randint(2, 25)
        longest, longest_step = Trial(rng, devices, edits).run()
        assert len(longest) == edits
        assert max(longest.values()) <= 2.0 + (edits + 1) * (0.4 + longest_step)
