"""Policies for gangs of devices: against enumeration, brute force and their own promises."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from maskserve_engine.planning.degree_costs import DEGREES
from maskserve_engine.scheduling.gangs.deadline import Deadline
from maskserve_engine.scheduling.gangs.fixed import Fixed
from maskserve_engine.scheduling.gangs.rounds import Option, Rounds, knapsack
from maskserve_engine.scheduling.gangs.work import (
    Work,
    allocate,
    blocks,
    choose_block,
    device_seconds,
    frontier,
)
from maskserve_engine.scheduling.step_scheduler import Ticket
from maskserve_studies.deadlines.gangs import (
    SIZES,
    GangCosts,
    Load,
    draw,
    simulate,
    step_times,
)
from maskserve_studies.deadlines.small_instances import optimum, small_instance

TIMES = step_times(GangCosts())


def random_times(rng: random.Random) -> tuple[float, ...]:
    """Seconds by degree: gains that shrink, and sometimes turn into losses."""
    times = [rng.uniform(0.1, 2.0)]
    for _ in range(3):
        times.append(times[-1] * rng.uniform(0.5, 1.1))
    return tuple(times)


def splits(steps: int, parts: int) -> list[tuple[int, ...]]:
    """All ways to share `steps` among `parts`."""
    if parts == 1:
        return [(steps,)]
    return [(n, *more) for n in range(steps + 1) for more in splits(steps - n, parts - 1)]


@pytest.mark.parametrize("seed", range(60))
def test_an_allocation_is_within_a_step_of_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    times, steps = random_times(rng), rng.randint(1, 9)
    slack = rng.uniform(0.8, 1.2) * steps * rng.choice(times)
    costs = [
        sum(n * k * t for n, k, t in zip(split, DEGREES, times, strict=True))
        for split in splits(steps, 4)
        if sum(n * t for n, t in zip(split, times, strict=True)) <= slack
    ]
    shares = allocate(times, steps, slack)
    assert bool(shares) == bool(costs)
    if costs:
        assert len(shares) <= 2
        assert sum(s.steps for s in shares) == steps
        assert sum(s.steps * times[s.degree.bit_length() - 1] for s in shares) <= slack + 1e-9
        step = max(k * t for k, t in frontier(times))
        assert min(costs) - 1e-9 <= device_seconds(times, shares) <= min(costs) + step


@pytest.mark.parametrize("seed", range(40))
def test_the_knapsack_is_as_good_as_trying_all(seed: int) -> None:
    rng = random.Random(seed)
    groups = [
        [
            Option(0, 0, rng.random() < 0.4),
            *(Option(rng.choice(DEGREES), 1, rng.random() < 0.8) for _ in range(rng.randint(0, 2))),
        ]
        for _ in range(rng.randint(1, 6))
    ]

    def survivors(picks: tuple[int, ...]) -> int:
        options = [group[pick] for group, pick in zip(groups, picks, strict=True)]
        fits = sum(o.degree for o in options) <= 8
        return sum(o.survives for o in options) if fits else -1

    best = max(map(survivors, itertools.product(*(range(len(group)) for group in groups))))
    assert survivors(tuple(knapsack(groups, 8))) == best


def test_gangs_of_eight_devices_are_fifteen_aligned_blocks() -> None:
    assert [len(blocks(k, 8)) for k in DEGREES] == [8, 4, 2, 1]
    assert choose_block(2, 8, 0b1, 0) == 0b1100  # the half in use is filled first
    assert choose_block(2, 8, 0b1, 0b110000) == 0b110000  # where it was
    assert choose_block(4, 8, 0b00010001, 0) == 0


def policies() -> list[object]:
    return [
        *(Fixed(8, k) for k in DEGREES),
        Rounds(8, 0.1),
        Rounds(8, 0.01),
        Deadline(8),
    ]


@pytest.mark.parametrize("policy", policies(), ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("seed", [1, 2])
def test_all_edits_end_and_no_device_is_given_twice(policy, seed: int) -> None:
    tickets = draw(Load("skewed", 25.0, 1.0, edits=20, steps=6), TIMES, seed)
    outcome = simulate(policy, tickets, 8)
    assert set(outcome.ended) == {t.request_id for t in tickets}
    for ticket in tickets:
        least = ticket.arrival + ticket.steps * min(ticket.seconds)
        assert outcome.ended[ticket.request_id] >= least - 1e-9


def test_edits_without_due_time_do_not_starve() -> None:
    """A stream of edits that fill all devices for ever, and one that nobody waits for."""
    urgent = draw(Load("skewed", 60.0, 1.0, edits=60, steps=50), TIMES, 3)
    idle = Ticket("idle", 20, 4096, 4096, 0.0, seconds=TIMES[1024])
    outcome = simulate(Deadline(8, patience=1.0), [idle, *urgent], 8)
    assert outcome.ended["idle"] < 20 * 3.0
    assert outcome.ended["idle"] < urgent[-1].arrival


def test_alone_an_edit_meets_its_due_time_at_few_devices() -> None:
    for side in SIZES:
        ticket = Ticket(str(side), 50, 1, 1, 0.0, due=5.0, seconds=TIMES[side])
        outcome = simulate(Deadline(8), [ticket], 8)
        assert outcome.in_time() == 1.0


def test_the_largest_is_given_up_when_not_all_can_be_in_time() -> None:
    big = Ticket("big", 50, 1, 1, 0.0, due=5.0, seconds=TIMES[2048])
    small = [Ticket(f"s{i}", 50, 1, 1, 0.0, due=2.0, seconds=TIMES[512]) for i in range(6)]
    outcome = simulate(Deadline(8), [big, *small], 8)
    assert outcome.in_time("s") == 1.0
    assert outcome.ended["big"] > 5.0


def test_a_round_places_nothing_between_its_ends() -> None:
    policy = Rounds(8, 1.0)
    first, second = (Work(Ticket(n, 9, 1, 1, 0.0, seconds=(0.3,) * 4), 9, 0.0) for n in "ab")
    plan = policy.decide(0.0, [first])
    assert plan.next_decision == 1.0
    assert plan.runs[0].steps == 3
    assert policy.decide(0.5, [first, second]).runs == ()
    with pytest.raises(ValueError, match="no such round"):
        Rounds(8, 0.0)


def test_a_round_serves_late_edits_last() -> None:
    """A late edit took all devices from edits that could be in time."""
    late = Work(Ticket("late", 50, 1, 1, 0.0, due=0.1, seconds=TIMES[2048]), 50, 0.0)
    punctual = [
        Work(Ticket(f"e{n}", 50, 1, 1, 0.0, due=9.0, seconds=TIMES[1024]), 50, 0.0)
        for n in range(4)
    ]
    runs = Rounds(8, round_steps=4).decide(0.0, [late, *punctual]).runs
    assert {row.request_id for run in runs for row in run.rows} >= {"e0", "e1", "e2", "e3"}
    alone = Rounds(8, round_steps=4).decide(0.0, [late]).runs
    assert [len(run.devices) for run in alone] == [8]


def test_a_round_lasts_some_steps_of_the_slowest_edit_that_is_there() -> None:
    policy = Rounds(8, round_steps=4)
    small, large = (
        Work(Ticket(n, 50, 1, 1, 0.0, seconds=TIMES[side]), 50, 0.0)
        for n, side in (("small", 256), ("large", 1024))
    )
    assert policy.decide(0.0, [small, large]).next_decision == pytest.approx(4 * min(TIMES[1024]))
    assert policy.decide(9.0, [small]).next_decision == pytest.approx(9.0 + 4 * min(TIMES[256]))
    with pytest.raises(ValueError, match="no such round"):
        Rounds(8, round_steps=0)


@pytest.mark.parametrize("lost", [(0,), (0, 4), (0, 2, 4, 6), tuple(range(7))])
def test_rounds_go_on_with_the_devices_that_are_left(lost: tuple[int, ...]) -> None:
    lost_works = [
        Work(Ticket(f"lost {n}", 1, 0, 0, 0.0, seconds=(1.0,) * 4), 1, 0.0, 1 << n, math.inf, 1)
        for n in lost
    ]
    works = [
        Work(Ticket(str(n), 50, 1, 1, 0.0, due=3.0, seconds=TIMES[1024]), 50, 0.0) for n in range(9)
    ]
    runs = Rounds(8, round_steps=4).decide(0.0, [*lost_works, *works]).runs
    used = [device for run in runs for device in run.devices]
    assert sorted(used) == sorted(set(range(8)).difference(lost))
    everything = [Work(lost_works[0].ticket, 1, 0.0, 1 << n, math.inf, 1) for n in range(8)]
    assert Rounds(8, 1.0).decide(0.0, [*everything, *works]).runs == ()


def test_costs_are_those_of_the_counted_table() -> None:
    """Milliseconds and GB at 1024 x 1024, 495 TFLOP/s: dense, and cached at mask ratio 0.1."""
    costs = GangCosts(495.0)
    dense, cached = costs.seconds(1024), costs.seconds(1024, 0.1)
    assert [round(1e3 * t) for t in dense] == [155, 86, 48, 28]
    assert [round(1e3 * t) for t in cached] == [35, 23, 15, 11]
    efficiency = [dense[0] / (k * t) for k, t in zip(DEGREES, dense, strict=True)]
    assert [round(e, 2) for e in efficiency] == [1.0, 0.9, 0.82, 0.7]


def test_a_ticket_takes_no_times_that_are_none() -> None:
    with pytest.raises(ValueError, match="times of a step"):
        Ticket("a", 1, 1, 1, 0.0, seconds=(0.1, math.inf))


def test_no_policy_beats_the_optimum_that_the_search_finds() -> None:
    for seed in range(25):
        tickets = small_instance(TIMES, seed)
        best = optimum(tickets, 4)
        assert len(tickets) * simulate(Deadline(4), tickets, 4).in_time() <= best + 1e-9
        assert len(tickets) * simulate(Rounds(4, 0.2), tickets, 4).in_time() <= best + 1e-9


def test_the_optimum_of_two_edits_that_need_all_devices_is_one() -> None:
    edits = [Ticket(n, 2, 1, 1, 0.0, due=1.1, seconds=(2.0, 1.0, 0.5)) for n in "ab"]
    assert optimum(edits, 4) == 1
    assert optimum([edits[0], Ticket("c", 2, 1, 1, 0.0, due=2.2, seconds=(2.0, 1.0, 0.5))], 4) == 2
