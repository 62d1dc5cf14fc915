"""A policy for gangs as the engine asks for it: no device twice, no edit lost, whatever happens."""

from __future__ import annotations

import random

import pytest

from maskserve_common.errors import InvalidRequest, Overloaded
from maskserve_engine.scheduling.gangs.batching import Batching
from maskserve_engine.scheduling.gangs.deadline import Deadline
from maskserve_engine.scheduling.gangs.fixed import Fixed
from maskserve_engine.scheduling.gangs.rounds import Rounds
from maskserve_engine.scheduling.gangs.scheduler import GangScheduler
from maskserve_engine.scheduling.gangs.work import GangPolicy
from maskserve_engine.scheduling.step_scheduler import Devices, Run, Ticket

BY_DEGREE = (0.4, 0.22, 0.13, 0.09)


def ticket(name: str, steps: int, arrival: float = 0.0, **values: object) -> Ticket:
    fields = {"seconds": BY_DEGREE, **values}
    return Ticket(name, steps, 10, 10, arrival, **fields)  # type: ignore[arg-type]


def deadline(max_rows: int = 8, max_waiting: int = 8) -> GangScheduler:
    return GangScheduler(Deadline(4), 4, max_rows, max_waiting)


def test_an_edit_gets_the_devices_that_its_due_time_needs() -> None:
    scheduler = deadline()
    scheduler.submit(ticket("urgent", 10, due=2.5))
    for name in "abc":
        scheduler.submit(ticket(name, 10, due=100.0))
    decision = scheduler.schedule(0.0)
    assert {t.request_id for t in decision.admitted} == {"urgent", "a", "b", "c"}
    degrees = {run.rows[0].request_id: len(run.devices) for run in decision.runs}
    assert degrees["urgent"] >= 2
    assert sum(degrees.values()) == 4


def test_what_is_lost_or_runs_for_nobody_is_not_given_away() -> None:
    scheduler = deadline()
    scheduler.submit(ticket("a", 10))
    scheduler.submit(ticket("b", 10))
    runs = scheduler.schedule(0.0, Devices(lost=frozenset({0}))).runs
    assert all(0 not in run.devices for run in runs)
    busy = frozenset(device for run in runs for device in run.devices)
    for name in "ab":
        scheduler.cancel(name)  # their steps run on
    scheduler.submit(ticket("c", 10))
    after = scheduler.schedule(0.1, Devices(busy, frozenset({0}))).runs
    assert all(busy.isdisjoint(run.devices) and 0 not in run.devices for run in after)
    scheduler.check_integrity()


@pytest.mark.parametrize("other_count", [0, 6])
def test_nobody_waits_for_a_device_that_is_lost(other_count: int) -> None:
    """One that gains by two devices, and is due when it had them: it steps on the one left."""
    scheduler = GangScheduler(Deadline(2), 2, 8, 8)
    scheduler.submit(ticket("a", 10, due=7.0, seconds=(1.0, 0.6)))
    for number in range(other_count):
        scheduler.submit(ticket(str(number), 10, seconds=(1.0, 0.6)))
    for now in (0.0, 1.0, 2.0):
        (run,) = scheduler.schedule(now, Devices(lost=frozenset({0}))).runs
        assert run.devices == (1,)


def test_edits_of_one_degree_take_turns_and_fewer_devices_where_some_are_lost() -> None:
    scheduler = GangScheduler(Fixed(4, 4), 4, 8, 8)
    for name in "ab":
        scheduler.submit(ticket(name, 2, arrival=float(name == "b")))
    served = []
    for now, lost in enumerate((frozenset[int](), frozenset({3}), frozenset({3}), frozenset({3}))):
        (run,) = scheduler.schedule(float(now), Devices(lost=lost)).runs
        served.append((run.rows[0].request_id, run.devices))
        if now % 2:
            scheduler.finish(run.rows[0].request_id)
    assert served == [("a", (0, 1, 2, 3)), ("a", (0, 1)), ("b", (0, 1)), ("b", (0, 1))]


def test_a_step_that_was_lost_does_not_count() -> None:
    scheduler = deadline()
    scheduler.submit(ticket("a", 3, seconds=(0.4,)))
    (run,) = scheduler.schedule(0.0).runs
    lost = Devices(lost=frozenset(run.devices))
    (again,) = scheduler.schedule(0.1, lost).runs
    assert set(again.devices).isdisjoint(run.devices)
    assert scheduler._works["a"].remaining == 3


def test_queue_and_names_are_bounded_and_unique() -> None:
    scheduler = deadline(max_rows=1, max_waiting=2)
    scheduler.submit(ticket("a", 1))
    with pytest.raises(InvalidRequest):
        scheduler.submit(ticket("a", 1))
    scheduler.submit(ticket("b", 1))
    with pytest.raises(Overloaded, match="waiting already"):
        scheduler.submit(ticket("c", 1))


@pytest.mark.parametrize("seed", range(9))
def test_every_edit_ends_once_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    policies: tuple[GangPolicy, ...] = (
        Deadline(4), Rounds(4, 1.0), Batching(Rounds(4, round_steps=3), 2)
    )  # fmt: skip
    scheduler = GangScheduler(policies[seed % 3], 4, 2, 100)
    left, ended, cancelled = dict[str, int](), set[str](), set[str]()
    for number in range(30):
        name, steps = str(number), rng.randint(1, 6)
        left[name] = steps
        scheduler.submit(
            ticket(
                name,
                steps,
                rng.uniform(0, 5),
                due=rng.choice([None, rng.uniform(1, 30)]),
                deadline=rng.choice([None, None, 40.0]),
                background=rng.random() < 0.2,
                seconds=rng.choice([BY_DEGREE, BY_DEGREE[:1], ()]),
                shared=rng.choice([0.0, 0.05]),
            )
        )
    now, busy = 0.0, list[tuple[float, Run]]()
    lost = frozenset[int]()
    for _ in range(3000):
        now += rng.uniform(0.0, 0.2)
        if rng.random() < 0.05:
            lost = frozenset(rng.sample(range(4), rng.randint(0, 2)))
        over = [
            busy_run
            for busy_run in busy
            if busy_run[0] <= now or lost.intersection(busy_run[1].devices)
        ]
        for busy_run in over:
            busy.remove(busy_run)
            run = busy_run[1]
            for one in run.rows if lost.isdisjoint(run.devices) else ():
                name = one.request_id
                if name in ended | cancelled:
                    continue
                left[name] -= 1
                if not left[name]:
                    scheduler.finish(name)
                    ended.add(name)
        if rng.random() < 0.02 and (request_ids := [t.request_id for t in scheduler.running]):
            choice = rng.choice(request_ids)
            assert scheduler.cancel(choice) is not None
            cancelled.add(choice)
        if rng.random() < 0.1 and (running := [t.request_id for t in scheduler.running]):
            seconds = rng.choice([BY_DEGREE[:2], (0.01,), ()])
            scheduler.reprice(ticket(rng.choice(running), 1, seconds=seconds))
        busy_devices = frozenset(device for _, run in busy for device in run.devices)
        decision = scheduler.schedule(now, Devices(busy_devices, lost))
        cancelled |= {expired_ticket.request_id for expired_ticket in decision.expired}
        for run in decision.runs:
            assert busy_devices.isdisjoint(run.devices)
            assert lost.isdisjoint(run.devices)
            busy_devices |= {*run.devices}
            busy.append((now + rng.uniform(0.01, 0.5), run))
        scheduler.check_integrity()
        if not len(scheduler):
            break
    assert ended | cancelled == set(left)
    assert not ended & cancelled


@pytest.mark.parametrize(("fewer", "degree"), [(0, 2), (6, 1)])
def test_a_row_with_fewer_steps_needs_fewer_devices_to_be_in_time(fewer: int, degree: int) -> None:
    """One whose row is made with fewer steps than it was queued with."""
    scheduler = deadline()
    scheduler.submit(ticket("urgent", 10, due=2.5))
    for name in "abc":
        scheduler.submit(ticket(name, 10, due=100.0))
    scheduler.schedule(0.0)
    scheduler.reprice(ticket("urgent", 1), fewer)
    [steps] = [row.steps for row in scheduler.running if row.request_id == "urgent"]
    assert steps == 10 - fewer
    runs = scheduler.schedule(0.25).runs
    [run] = [run for run in runs if run.rows[0].request_id == "urgent"]
    assert len(run.devices) == degree


def test_a_round_that_has_not_ended_is_asked_for_again() -> None:
    scheduler = GangScheduler(Rounds(4, 1.0), 4, 8, 8)
    scheduler.submit(ticket("a", 2))
    assert scheduler.schedule(0.0).next_decision == 1.0
    scheduler.submit(ticket("b", 9))
    scheduler.finish("a")
    decision = scheduler.schedule(0.5)
    assert (decision.runs, decision.next_decision) == ((), 1.0)
    assert scheduler.schedule(1.0).runs


class Stepping:
    """A worker of two devices whose steps take the predicted time; edits come when they are due."""

    def __init__(self, policy: GangPolicy, arrivals: list[Ticket]) -> None:
        self.scheduler = GangScheduler(policy, 2, 8, 1000)
        self.arrivals, self.now = sorted(arrivals, key=lambda t: t.arrival), 0.0
        self.steps: dict[str, int] = {}
        """That an edit has taken."""
        self.ended: dict[str, float] = {}
        self._busy: list[tuple[float, Run]] = []
        self._left: dict[str, int] = {}

    def until(self, end: float) -> None:
        """Step until that time."""
        while self.now < end:
            for when, run in [
                busy_run for busy_run in self._busy if busy_run[0] <= self.now + 1e-9
            ]:
                self._busy.remove((when, run))
                for row in run.rows:
                    name = row.request_id
                    self.steps[name] = self.steps.get(name, 0) + 1
                    self._left[name] -= 1
                    if not self._left[name]:
                        self.scheduler.finish(name)
                        self.ended[name] = self.now
            while self.arrivals and self.arrivals[0].arrival <= self.now:
                arrival = self.arrivals.pop(0)
                self._left[arrival.request_id] = arrival.steps
                self.scheduler.submit(arrival)
            busy = frozenset(device for _, run in self._busy for device in run.devices)
            decision = self.scheduler.schedule(self.now, Devices(busy))
            for run in decision.runs:
                lasts = max(row.seconds[len(run.devices).bit_length() - 1] for row in run.rows)
                self._busy.append((self.now + lasts, run))
            self.scheduler.check_integrity()
            nexts = [when for when, _ in self._busy] + [t.arrival for t in self.arrivals[:1]]
            soonest = min([when for when in nexts if when > self.now + 1e-9], default=end)
            self.now = min(
                max(soonest, self.now + 1e-6), max(decision.next_decision, self.now + 1e-6)
            )


POLICIES = {
    "deadline": lambda: Deadline(2),
    "deadline batched": lambda: Batching(Deadline(2), 8),
    "rounds": lambda: Rounds(2, round_steps=5),
    "together": lambda: Fixed(2, 2),
}
TWO = (0.15, 0.09)


def flood(key: str, seconds: float, priority: int = 0, **values: float) -> list[Ticket]:
    """More short edits than two devices can do, for so long."""
    tickets = []
    for number in range(int(seconds / 0.4)):
        at = 0.4 * number
        due = at + values["due"] if "due" in values else None
        name = f"{key}{number}"
        tickets.append(Ticket(name, 9, 10, 10, at, seconds=TWO, due=due, priority=priority))
    return tickets


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_edit_gets_on_beside_short_ones_that_come_and_come(policy: str) -> None:
    """After 150 s it had taken 8 of 60 steps: cheaper edits, or ones due sooner, came first."""
    long = Ticket("long", 60, 10, 10, 0.0, seconds=TWO)
    worker = Stepping(POLICIES[policy](), [long, *flood("", 150.0, due=6.0)])
    worker.until(150.0)
    assert "long" in worker.ended, worker.steps["long"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("due", [{}, {"due": 4.0}])
def test_a_key_that_floods_the_devices_takes_its_half(policy: str, due: dict[str, float]) -> None:
    """Whatever it says of due times and priority; alone the edit takes nine seconds."""
    modest = Ticket("modest!one", 60, 10, 10, 5.0, seconds=TWO)
    worker = Stepping(POLICIES[policy](), [modest, *flood("greedy!", 60.0, 100, **due)])
    worker.until(60.0)
    assert worker.ended["modest!one"] <= 5.0 + 2 * 9.0
