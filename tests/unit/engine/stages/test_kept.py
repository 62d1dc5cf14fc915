"""Values that are kept within a budget of bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from maskserve_engine.stages.kept import Kept


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
