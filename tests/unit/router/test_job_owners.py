"""Which routers another takes for lost, and when keys without room try again."""

from __future__ import annotations

from maskserve_router.jobs.owners import Owners
from maskserve_router.jobs.pauses import Pauses


def test_a_router_without_a_beat_is_lost() -> None:
    owners = Owners("me", 4.0)
    assert owners.find_lost({"me": 1, "x": 1, "y": 1}, 0.0) == []
    for second in range(1, 4):
        assert owners.find_lost({"me": 1, "x": 1, "y": second}, float(second)) == []
    assert owners.find_lost({"me": 1, "x": 1, "y": 4}, 4.0) == [("x", 1)]
    assert owners.find_lost({"me": 1, "y": 4}, 5.0) == []  # nor is this one ever lost to itself


def test_time_without_a_look_does_not_count() -> None:
    """While this router is stopped, or the database away, others cannot beat."""
    owners = Owners("me", 4.0)
    owners.find_lost({"x": 1}, 0.0)
    assert owners.find_lost({"x": 1}, 3600.0) == []
    assert owners.find_lost({"x": 2}, 3601.0) == []
    for second in range(3602, 3605):
        assert owners.find_lost({"x": 2}, float(second)) == []
    assert owners.find_lost({"x": 2}, 3605.0) == [("x", 2)]


def test_one_job_of_a_key_tries_whether_there_is_room() -> None:
    pauses = Pauses()
    assert pauses.may_begin("a", 0.0)
    pauses.record_refusal("a", 0.0, 1.0)
    pauses.record_refusal("a", 0.5, 1.0)  # begun together
    assert not pauses.may_begin("a", 0.9)
    assert pauses.may_begin("b", 0.9)
    assert pauses.may_begin("a", 1.0)
    pauses.record_begin("a", "1")
    assert not pauses.may_begin("a", 2.0)
    pauses.record_refusal("a", 2.0, 1.0)
    pauses.record_end("a", "1")
    assert not pauses.may_begin("a", 3.9)
    assert pauses.may_begin("a", 4.0)
    pauses.record_begin("a", "2")
    pauses.lift("a")
    assert pauses.may_begin("a", 4.0)


def test_pauses_grow_to_half_a_minute() -> None:
    pauses, now_s, tries = Pauses(), 0.0, 0
    while now_s < 3600:
        if pauses.may_begin("a", now_s):
            tries += 1
            pauses.record_begin("a", f"{tries}")
            pauses.record_refusal("a", now_s, 1.0)
            pauses.record_end("a", f"{tries}")
        now_s += 1.0
    assert 110 < tries < 140
