"""Values that are kept within a budget of bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from maskserve_common.lru_cache import LruCache


@given(
    budget=st.integers(0, 40),
    operations=st.lists(st.tuples(st.sampled_from(["get", "put", "drop"]), st.integers(0, 9))),
)
def test_it_does_what_a_list_in_order_of_use_does(
    budget: int, operations: list[tuple[str, int]]
) -> None:
    cache: LruCache[int, bytes] = LruCache(budget, len)
    order: list[int] = []
    for operation, key in operations:
        value = bytes(1 + 3 * key)
        if operation == "get":
            assert (cache.get(key) is not None) == (key in order)
            if key in order:
                order.append(order.pop(order.index(key)))
            continue
        if key in order:
            order.remove(key)
        if operation == "drop":
            cache.drop(key)
        else:
            cache.put(key, value)
            if len(value) <= budget:
                order.append(key)
            while sum(1 + 3 * size for size in order) > budget:
                order.pop(0)
        assert cache.nbytes == sum(1 + 3 * size for size in order) <= budget
        assert list(cache) == order
        assert len(cache) == len(order)


def test_owners_share_the_budget() -> None:
    evicted: list[tuple[str, int]] = []
    cache: LruCache[tuple[str, int], bytes] = LruCache(
        100, len, owner=lambda key: key[0], on_evict=lambda key, value: evicted.append(key)
    )
    for i in range(10):
        cache.put(("greedy", i), bytes(10))
    assert cache.nbytes == 50  # alone it leaves as much as it has
    for i in range(10):
        cache.put(("modest", i), bytes(10))
    assert {("modest", 9), ("greedy", 9)} <= set(cache._values)
    evicted.clear()
    cache.put(("third", 0), bytes(40))
    assert evicted == [("greedy", 5)]
    assert cache.nbytes <= 100


def test_after_its_time_a_value_goes() -> None:
    now_s = 0.0
    evicted: list[str] = []
    cache: LruCache[str, str] = LruCache(
        10, expires_s=5.0, now=lambda: now_s, on_evict=lambda key, value: evicted.append(value)
    )
    cache.put("a", "x")
    cache.put("b", "y")
    now_s = 4.0
    assert cache.get("a") == "x"
    now_s = 6.0
    assert (cache.get("b"), len(cache)) == (None, 1)
    now_s = 9.1
    assert (cache.get("a"), cache.nbytes) == (None, 0)
    assert evicted == ["y", "x"]
    cache.put("c", "first")
    cache.put("c", "second")  # what another replaces is not gone
    cache.drop("c")
    assert evicted[2:] == ["second"]
    LruCache[str, str](0, on_evict=lambda key, value: evicted.append(value)).put("d", "too large")
    assert evicted[3:] == ["too large"]
