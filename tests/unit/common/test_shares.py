"""Budgets that keys share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskserve_common.shares import EVERYBODY, Full, KeyWork, Shares, urgency


@pytest.mark.parametrize(("keys", "share"), [(1, 50), (2, 33), (3, 25), (9, 10)])
def test_keys_that_take_all_they_may_leave_as_much_to_the_next(keys: int, share: int):
    shares = Shares(100)
    names = [f"k{i}" for i in range(keys)]
    while takers := [name for name in names if shares.room(name)]:
        shares.take(min(takers, key=shares.rank))
    assert all(share - 1 <= shares.in_use(name) <= share + 1 for name in names)
    assert shares.room("newcomer") >= (100 - shares.total) // 2 > 0


def test_one_key_alone_cannot_fill_the_budget_and_everybody_can():
    shares = Shares(100)
    with pytest.raises(Full) as full:
        shares.take("greedy", 51)
    assert full.value.of_key
    with shares.hold("greedy", 50):
        with shares.hold("other", 25), pytest.raises(Full) as full:
            shares.take(EVERYBODY, 26)
        assert not full.value.of_key
        shares.take(EVERYBODY, 50)
        assert shares.room("other") == 0
    assert (shares.total, shares.in_use(EVERYBODY), shares.in_use("greedy")) == (50, 50, 0)


def test_who_holds_nothing_may_have_one_unit_of_the_smallest_budget():
    shares = Shares(1)
    with shares.hold("a"), pytest.raises(Full):
        shares.take("b")
    shares.take("b")


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 30)), max_size=60))
def test_whatever_is_taken_stays_within_budget_and_share(requests: list[tuple[str, int]]):
    shares, sizes_in_use = Shares(97), dict.fromkeys("abcd", 0)
    for key, size in requests:
        free = 97 - sum(sizes_in_use.values())
        fits = sizes_in_use[key] + size <= free - size or (
            sizes_in_use[key] == 0 and size == 1 <= free
        )
        if fits:
            shares.take(key, size)
            sizes_in_use[key] += size
        else:
            with pytest.raises(Full):
                shares.take(key, size)
        assert shares.total == sum(sizes_in_use.values()) <= 97
    assert all(shares.in_use(key) == booked_size for key, booked_size in sizes_in_use.items())


@given(st.integers(0, 100), st.floats(0, 1e4), st.none() | st.floats(0, 1e6))
def test_nobody_is_overtaken_for_ever(priority: int, arrival: float, due: float | None):
    patience, aging = 60.0, 5.0
    edit_urgency = urgency(arrival, 0, aging, due, patience)
    late = arrival + patience + aging * priority + 1.0
    assert edit_urgency < urgency(late, priority, aging, due=late, patience_s=patience)


def test_what_a_key_lags_beyond_a_bound_is_forgotten():
    work = KeyWork()
    for key, seconds in (("busy", 100.0), ("late", 5.0), ("near", 95.0)):
        work.add(key, seconds, steps=0)
    work.catch_up(["busy", "late", "near", "new"], 10.0)
    assert [work.used(key) for key in ("busy", "late", "near", "new")] == [100.0, 90.0, 95.0, 90.0]


def test_the_work_of_the_busiest_of_very_many_keys_is_remembered():
    work = KeyWork()
    for number in range(5000):
        work.add(f"k{number}", float(number), steps=0)
    assert work.used("k4999") == 4999.0
    assert sum(work.used(f"k{number}") > 0 for number in range(5000)) <= 4096
