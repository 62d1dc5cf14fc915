"""Edits wait for sets of resources: bounded waiting, budgets, pins and eviction by score."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskserve_common.errors import EngineFailed, Overloaded
from maskserve_common.resources.resource_states import Resource, ResourceStates

ONE, TWO, BIG = Resource("lora", "one"), Resource("lora", "two"), Resource("lora", "big")
TEMPLATE = Resource("template", "t")


def test_an_edit_waits_until_all_that_it_needs_is_here() -> None:
    resource_states = ResourceStates(8, {"lora": 100})
    assert resource_states.reserve(ONE, 10)
    assert resource_states.wait("edit", [ONE, TEMPLATE])
    assert resource_states.wait("other", [TEMPLATE])
    assert resource_states.record_arrival(TEMPLATE) == ["other"]
    assert resource_states.state(TEMPLATE) == "absent"  # the store keeps it, not this
    assert resource_states.record_arrival(ONE) == ["edit"]
    assert resource_states.state(ONE) == "ready"
    assert not resource_states.wait("late", [ONE])
    resource_states.check_integrity()


def test_what_fails_tells_those_who_wait_and_those_who_come() -> None:
    resource_states = ResourceStates(8, {"lora": 100})
    resource_states.reserve(ONE, 10)
    resource_states.wait("a", [ONE])
    resource_states.wait("b", [ONE, TWO])
    resource_states.wait("c", [TWO])
    error = EngineFailed("adapter one could not be read")
    assert resource_states.record_failure(ONE, error) == ["a", "b"]
    assert resource_states.nbytes("lora") == 0
    with pytest.raises(EngineFailed, match="adapter one"):
        resource_states.wait("d", [ONE])
    assert resource_states.record_arrival(TWO) == ["c"]
    assert resource_states.reserve(ONE, 10)  # tried again
    assert resource_states.wait("d", [ONE])


def test_waiting_is_bounded_and_who_leaves_makes_room() -> None:
    resource_states = ResourceStates(1)
    resource_states.wait("a", [TEMPLATE])
    with pytest.raises(Overloaded, match="1 edits wait for their template"):
        resource_states.wait("b", [TEMPLATE])
    resource_states.leave("a")
    assert resource_states.wait("b", [TEMPLATE])
    assert resource_states.record_arrival(TEMPLATE) == ["b"]
    resource_states.leave("b")


def test_the_least_valuable_goes_and_nothing_that_is_pinned() -> None:
    resources: list[Resource] = []
    resource_states = ResourceStates(8, {"lora": 100}, resources.append)
    for key, score in ((ONE, 1.0), (TWO, 2.0)):
        resource_states.reserve(key, 40, score)
        resource_states.record_arrival(key)
    assert not resource_states.reserve(BIG, 60, 0.5)  # worth less than what is here
    resource_states.pin(ONE)
    resource_states.pin(ONE)
    resource_states.unpin(ONE)
    assert resource_states.reserve(BIG, 60, 3.0)
    assert resources == [TWO]
    assert resource_states.state(TWO) == "absent"
    assert not resource_states.reserve(TWO, 101, 9.0)
    resource_states.unpin(ONE)
    resource_states.evict(BIG)  # on its way: it stays
    assert resource_states.state(BIG) == "loading"
    resource_states.check_integrity()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60), st.integers(0, 3), st.booleans())))
def test_no_order_of_events_passes_the_budget(
    events: list[tuple[int, int, int, bool]],
) -> None:
    resource_states = ResourceStates(4, {"lora": 100})
    for name, nbytes, score, ends in events:
        resource = Resource("lora", str(name))
        if resource_states.state(resource) == "loading" and ends:
            resource_states.record_arrival(resource)
        elif not resource_states.reserve(resource, nbytes, float(score)):
            assert resource_states.state(resource) in ("absent", "failed")
        resource_states.check_integrity()


def test_of_those_who_may_wait_each_key_has_a_share() -> None:
    resource_states = ResourceStates(4)
    for number in range(2):
        resource_states.wait(f"greedy!{number}", [TEMPLATE])
    with pytest.raises(Overloaded, match="2 edits of this key wait for their template"):
        resource_states.wait("greedy!2", [TEMPLATE])
    assert resource_states.wait("modest!one", [TEMPLATE])
