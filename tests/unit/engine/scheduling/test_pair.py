"""One batch over both devices of a worker."""

from __future__ import annotations

from maskserve_engine.scheduling.pair import Pair
from maskserve_engine.scheduling.step_scheduler import Devices, Ticket


def ticket(name: str, **more: float) -> Ticket:
    return Ticket(name, steps=3, total_tokens=8, active_tokens=4, arrival=0.0, **more)


def test_all_rows_step_together_on_both_devices() -> None:
    policy = Pair(2, max_rows=2, max_waiting=9, priming_share=0.25)
    for name in "abc":
        policy.submit(ticket(name))
    (run,) = policy.schedule(0.0).runs
    assert [row.request_id for row in run.rows] == ["a", "b"]
    assert run.devices == (0, 1)


def test_nothing_begins_before_both_have_done() -> None:
    policy = Pair(2, 2, 9, 0.25)
    policy.submit(ticket("a", deadline=1.0))
    assert policy.schedule(0.0, Devices(busy=frozenset({1}))).runs == ()
    assert policy.schedule(2.0, Devices(busy=frozenset({1}))).expired == ()
    assert [expired_ticket.request_id for expired_ticket in policy.schedule(2.0).expired] == ["a"]
    policy.check_integrity()


def test_the_device_that_is_left_goes_on_alone() -> None:
    policy = Pair(2, 2, 9, 0.25)
    policy.submit(ticket("a"))
    assert [run.devices for run in policy.schedule(0.0, Devices(lost=frozenset({0}))).runs] == [
        (1,)
    ]
    assert policy.schedule(0.0, Devices(lost=frozenset({0, 1}))).runs == ()
    assert [run.devices for run in policy.schedule(0.0).runs] == [(0, 1)]
