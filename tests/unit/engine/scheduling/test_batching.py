"""Edits that share a step of a gang: the small ones, and only where no due time suffers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from maskserve_engine.scheduling.gangs.batching import Batching
from maskserve_engine.scheduling.gangs.deadline import Deadline
from maskserve_engine.scheduling.gangs.rounds import Rounds
from maskserve_engine.scheduling.gangs.scheduler import GangScheduler
from maskserve_engine.scheduling.gangs.work import GangPlan, Work, seconds_together
from maskserve_engine.scheduling.step_scheduler import Devices, Ticket
from maskserve_studies.deadlines.gangs import GangCosts, Load, draw, simulate, step_times

SMALL = {"seconds": (0.1,), "shared": 0.08}


def ticket(name: str, steps: int = 5, **more: object) -> Ticket:
    fields: dict[str, object] = {**SMALL, **more}
    return Ticket(name, steps, 1, 1, 0.0, **fields)  # type: ignore[arg-type]


def work(name: str, steps: int = 5, **more: object) -> Work:
    return Work(ticket(name, steps, **more), steps, 0.0)


def rows(plan: GangPlan) -> list[set[str]]:
    return [{row.request_id for row in run.rows} for run in plan.runs]


def test_small_edits_share_the_steps_of_others() -> None:
    works = [work(name) for name in "abcde"]
    plan = Batching(Deadline(1), max_rows=4).decide(0.0, works)
    assert rows(plan) == [{"a", "b", "c", "d"}]
    ended = {}
    for policy in (Deadline(1), Batching(Deadline(1), 8)):
        outcome = simulate(policy, [edit_work.ticket for edit_work in works], 1)
        ended[type(policy)] = max(outcome.ended.values())
    assert ended[Deadline] == pytest.approx(5 * 5 * 0.1)
    assert ended[Batching] == pytest.approx(5 * (0.08 + 5 * 0.02))


@pytest.mark.parametrize(
    "more",
    [
        {"shared": 0.01},  # too little to save
        {"batch_key": "other size"},
    ],
)
def test_what_gains_little_or_does_not_go_together_waits(more: dict[str, object]) -> None:
    plan = Batching(Deadline(1), 4).decide(0.0, [work("a"), work("b", **more)])
    assert len(rows(plan)[0]) == 1


def test_an_edit_is_not_made_late_by_one_that_joins() -> None:
    batching = Batching(Deadline(1), 4)
    tight, loose = work("tight", due=5 * 0.1 + 0.01), work("loose", due=5 * 0.12 + 0.01)
    assert rows(batching.decide(0.0, [tight, work("b")])) == [{"tight"}]
    assert rows(batching.decide(0.0, [loose, work("b")])) == [{"loose", "b"}]


def test_nor_is_one_that_waits_for_the_device() -> None:
    """It is of another size, and due when it begins behind the next step as it is."""
    batching = Batching(Deadline(1), 4)
    first = work("first", 1, due=0.13)
    soon = work("soon", due=0.1 + 5 * 0.1 + 0.005, batch_key="other")
    later = replace(soon, ticket=replace(soon.ticket, due=2.0))
    assert rows(batching.decide(0.0, [first, soon, work("b")])) == [{"first"}]
    assert rows(batching.decide(0.0, [first, later, work("b")])) == [{"first", "b"}]


def test_several_devices_are_shared_only_by_edits_that_gain_by_them() -> None:
    gains = {"seconds": (0.3, 0.2), "shared": 0.1}
    urgent = work("urgent", 4, due=4 * 0.31, **gains)  # two devices, or late
    batching = Batching(Deadline(2), 4)
    assert rows(batching.decide(0.0, [urgent, work("b", 4, **gains)]))[0] >= {"urgent"}
    alone = work("one", 4, seconds=(0.3, 0.3), shared=0.1)
    for plan in (batching.decide(0.0, [urgent, alone]),):
        for run in plan.runs:
            names = {row.request_id for row in run.rows}
            assert names != {"urgent", "one"} or len(run.devices) == 1


@pytest.mark.parametrize("seed", range(40))
def test_random_instances(seed: int) -> None:
    """Devices and edits are taken once, what the other policy began is begun, and nobody who was in
    time is late by who joined.
    """
    rng = random.Random(seed)
    devices = rng.choice((1, 2, 4))
    for _ in range(30):
        works = []
        for number in range(rng.randint(1, 9)):
            one = rng.uniform(0.05, 1.0)
            times = [one]
            while len(times) < devices.bit_length():
                times.append(times[-1] * rng.choice((1.0, rng.uniform(0.5, 1.0))))
            steps, shared = rng.randint(1, 9), rng.uniform(0.0, min(times))
            due = None if rng.random() < 0.4 else steps * rng.choice(times) * rng.uniform(0.5, 3)
            key = rng.choice("xy")
            works.append(
                work(
                    str(number), steps, seconds=tuple(times), shared=shared, due=due, batch_key=key
                )
            )
        decide = Deadline(devices).decide(0.0, works)
        plan = Batching(Deadline(devices), 3).decide(0.0, works)
        assert [run.devices for run in plan.runs] == [run.devices for run in decide.runs]
        names = [row.request_id for run in plan.runs for row in run.rows]
        assert len(set(names)) == len(names)
        left = {edit_work.ticket.request_id: edit_work for edit_work in works}
        for run, alone in zip(plan.runs, decide.runs, strict=True):
            assert set(alone.rows) <= set(run.rows)
            assert len(run.rows) <= 3
            assert len({row.batch_key for row in run.rows}) == 1
            degree = len(run.devices)
            together = seconds_together(run.rows, degree)
            for row in alone.rows:
                steps = left[row.request_id].remaining
                if row.due is not None and steps * seconds_together([row], degree) <= row.due:
                    assert steps * together <= row.due


def test_a_round_that_is_shared_is_no_longer() -> None:
    """A step takes 0.1 s, and 0.02 s more for each edit that joins. An edit with fewer steps than
    the run stays out: its devices would idle.
    """
    for lasts, rows_of, other in ((0.49, 2, 9), (0.49, 1, 3), (0.42, 1, 9)):
        works = [work("a", 9), work("b", other), work("c", other)]
        (run,) = Batching(Rounds(1, lasts), 4).decide(0.0, works).runs
        assert (len(run.rows), run.steps) == (rows_of, 4)
        assert run.steps * seconds_together(run.rows, 1) <= lasts


@pytest.mark.parametrize("mix", ["uniform", "skewed"])
def test_no_device_is_given_twice_while_rows_share_steps(mix: str) -> None:
    """The simulation raises where one is."""
    costs = GangCosts()
    load = Load(mix, 60.0, edits=60)
    for policy in (Batching(Deadline(8), 8), Batching(Rounds(8, 0.3), 8)):
        tickets = draw(load, step_times(costs), 1, costs.fixed)
        outcome = simulate(policy, tickets, 8)
        assert set(outcome.ended) == {ticket.request_id for ticket in tickets}


def test_devices_whose_step_is_shared_are_busy() -> None:
    running = [replace(work(name), gang=0b1, until=0.1, running_steps=1) for name in "ab"]
    plan = Deadline(2).decide(0.0, [*running, work("c"), work("d")])
    assert [run.devices for run in plan.runs] == [(1,)]


def test_all_rows_of_a_step_are_booked() -> None:
    scheduler = GangScheduler(Batching(Deadline(1), 4), 1, 4, 8)
    for name in "ab":
        scheduler.submit(ticket(name, 2))
    (run,) = scheduler.schedule(0.0).runs
    assert {row.request_id for row in run.rows} == {"a", "b"}
    assert scheduler.schedule(0.05, Devices(busy=frozenset({0}))).runs == ()
    (run,) = scheduler.schedule(0.12).runs
    assert len(run.rows) == 2
    scheduler.cancel("a")
    scheduler.finish("b")
    assert len(scheduler) == 0
    scheduler.check_integrity()
