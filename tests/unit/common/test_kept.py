"""Values that are kept within a budget of bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from maskserve_common.kept import Kept


@given(
    budget=st.integers(0, 40),
    operations=st.lists(st.tuples(st.sampled_from(["get", "put", "drop"]), st.integers(0, 9))),
)
def test_it_does_what_a_list_in_order_of_use_does(
    budget: int, operations: list[tuple[str, int]]
) -> None:
    kept: Kept[int, bytes] = Kept(budget, len)
    order: list[int] = []
    for what, key in operations:
        value = bytes(1 + 3 * key)
        if what == "get":
            assert (kept.get(key) is not None) == (key in order)
            if key in order:
                order.append(order.pop(order.index(key)))
            continue
        if key in order:
            order.remove(key)
        if what == "drop":
            kept.drop(key)
        else:
            kept.put(key, value)
            if len(value) <= budget:
                order.append(key)
            while sum(1 + 3 * each for each in order) > budget:
                order.pop(0)
        assert kept.held_bytes == sum(1 + 3 * each for each in order) <= budget
        assert len(kept) == len(order)


def test_owners_share_the_budget() -> None:
    gone: list[tuple[str, int]] = []
    kept: Kept[tuple[str, int], bytes] = Kept(
        100, len, owner=lambda key: key[0], gone=lambda key, value: gone.append(key)
    )
    for i in range(10):
        kept.put(("greedy", i), bytes(10))
    assert kept.held_bytes == 50  # alone it leaves as much as it has
    for i in range(10):
        kept.put(("modest", i), bytes(10))
    assert {("modest", 9), ("greedy", 9)} <= set(kept._values)
    gone.clear()
    kept.put(("third", 0), bytes(40))
    assert gone == [("greedy", 5)]
    assert kept.held_bytes <= 100


def test_after_its_time_a_value_goes() -> None:
    now = 0.0
    gone: list[str] = []
    kept: Kept[str, str] = Kept(
        10, expires_s=5.0, now=lambda: now, gone=lambda key, value: gone.append(value)
    )
    kept.put("a", "x")
    kept.put("b", "y")
    now = 4.0
    assert kept.get("a") == "x"
    now = 6.0
    assert (kept.get("b"), len(kept)) == (None, 1)
    now = 9.1
    assert (kept.get("a"), kept.held_bytes) == (None, 0)
    assert gone == ["y", "x"]
    kept.put("c", "first")
    kept.put("c", "second")  # what another replaces is not gone
    kept.drop("c")
    assert gone[2:] == ["second"]
    Kept[str, str](0, gone=lambda key, value: gone.append(value)).put("d", "too large")
    assert gone[3:] == ["too large"]
