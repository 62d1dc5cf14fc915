"""Rows over the devices of a worker: each has a batch of its own, and a lost one's rows go on."""

from __future__ import annotations

import random

import pytest

from maskserve_common.errors import InvalidRequest, Overloaded
from maskserve_engine.scheduling.spread import Spread
from maskserve_engine.scheduling.step_scheduler import Decision, Devices, Ticket


def ticket(name: str, steps: int = 4, tokens: int = 10, **values: object) -> Ticket:
    return Ticket(name, steps, tokens, tokens, **{"arrival": 0.0, **values})  # type: ignore[arg-type]


def rows(decision: Decision) -> dict[int, list[str]]:
    assert all(len(run.devices) == 1 for run in decision.runs)
    return {run.devices[0]: [t.request_id for t in run.rows] for run in decision.runs}


def test_a_ticket_goes_where_least_is_to_be_computed() -> None:
    spread = Spread(2, 4, 8, 0.25)
    for name, steps in (("long", 10), ("short", 2), ("next", 3), ("last", 1)):
        spread.submit(ticket(name, steps))
    decision = spread.schedule(0.0)
    assert rows(decision) == {0: ["long"], 1: ["short", "next", "last"]}
    assert {t.request_id for t in decision.admitted} == {"long", "short", "next", "last"}


def test_steps_that_were_taken_are_nothing_to_be_computed() -> None:
    spread = Spread(2, 4, 8, 0.25)
    spread.submit(ticket("long", 10))
    spread.submit(ticket("short", 6))
    for index in range(7):
        spread.schedule(float(index), Devices(busy=frozenset({1})))
    spread.submit(ticket("next"))
    assert rows(spread.schedule(7.0)) == {0: ["long", "next"], 1: ["short"]}


def test_less_work_that_is_left_counts_less() -> None:
    spread = Spread(2, 4, 8, 0.25)
    spread.submit(ticket("long", 10, 20))
    spread.submit(ticket("short", 6))
    spread.schedule(0.0)
    spread.reprice(Ticket("long", 1, 20, 5, 0.0))
    spread.submit(ticket("next", 1))
    assert rows(spread.schedule(1.0)) == {0: ["long", "next"], 1: ["short"]}
    with pytest.raises(KeyError):
        spread.reprice(ticket("none"))


def test_a_busy_device_is_left_alone() -> None:
    spread = Spread(2, 4, 8, 0.25)
    for name in "ab":
        spread.submit(ticket(name))
    assert rows(spread.schedule(0.0)) == {0: ["a"], 1: ["b"]}
    spread.submit(ticket("c"))
    assert rows(spread.schedule(1.0, Devices(busy=frozenset({0})))) == {1: ["b"]}
    assert rows(spread.schedule(2.0)) == {0: ["a", "c"], 1: ["b"]}


def test_rows_of_a_lost_device_go_on_elsewhere_and_nothing_waits_for_it() -> None:
    spread = Spread(2, 1, 1, 0.25)
    for arrival, name in enumerate("abcd"):
        spread.submit(ticket(name, arrival=float(arrival)))
        spread.schedule(0.0)
    with pytest.raises(Overloaded):
        spread.submit(ticket("e"))
    lost = Devices(lost=frozenset({0}))
    assert rows(spread.schedule(1.0, lost)) == {1: ["b"]}
    assert len(spread) == 4  # however many may wait, those taken on stay
    for name in "bacd":
        assert name in rows(spread.schedule(2.0, lost))[1]
        spread.finish(name)
    spread.submit(ticket("f"))
    assert rows(spread.schedule(3.0, lost)) == {1: ["f"]}
    spread.submit(ticket("g"))
    assert rows(spread.schedule(4.0)) == {0: ["g"], 1: ["f"]}
    spread.check_integrity()


def test_while_no_device_is_left_tickets_stay() -> None:
    spread = Spread(2, 4, 8, 0.25)
    spread.submit(ticket("a"))
    spread.schedule(0.0)
    none = Devices(lost=frozenset({0, 1}))
    assert spread.schedule(1.0, none).runs == ()
    spread.submit(ticket("b"))
    assert spread.schedule(2.0, none).runs == ()
    assert sum(map(len, rows(spread.schedule(3.0)).values())) == 2


def test_a_ticket_is_held_once() -> None:
    spread = Spread(2, 4, 8, 0.25)
    spread.submit(ticket("a"))
    with pytest.raises(InvalidRequest, match="still being served"):
        spread.submit(ticket("a"))
    assert spread.cancel("a") is not None
    assert spread.cancel("a") is None
    with pytest.raises(KeyError):
        spread.finish("a")


@pytest.mark.parametrize("seed", range(5))
def test_every_ticket_ends_once_whatever_is_lost(seed: int) -> None:
    rng = random.Random(seed)
    spread = Spread(4, 2, 100, 0.25)
    left = {str(n): rng.randint(1, 5) for n in range(30)}
    for name, steps in left.items():
        deadline = rng.choice([None, None, 20.0])
        spread.submit(ticket(name, steps, rng.randint(1, 20), deadline=deadline))
    ended: list[str] = []
    for index in range(1000):
        sample = rng.sample(range(4), rng.randint(0, 4))
        cut = rng.randint(0, len(sample))
        devices = Devices(frozenset(sample[:cut]), frozenset(sample[cut:]))
        decision = spread.schedule(float(index), devices)
        ended += [t.request_id for t in decision.expired]
        stepped = [t.request_id for run in decision.runs for t in run.rows]
        assert len(stepped) == len(set(stepped))
        assert not {run.devices[0] for run in decision.runs} & set(sample)
        for name in stepped:
            left[name] -= 1
            if not left[name]:
                spread.finish(name)
                ended.append(name)
        spread.check_integrity()
        if not len(spread):
            break
    assert sorted(ended) == sorted(left)
