"""Edits wait for sets of resources: bounded waiting, budgets, pins and eviction by score."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskserve_common.errors import EngineFailed, Overloaded
from maskserve_common.resources.resource_states import Residency, Resource

ONE, TWO, BIG = Resource("lora", "one"), Resource("lora", "two"), Resource("lora", "big")
TEMPLATE = Resource("template", "t")


def test_an_edit_waits_until_all_that_it_needs_is_here() -> None:
    residency = Residency(8, {"lora": 100})
    assert residency.reserve(ONE, 10)
    assert residency.wait("edit", [ONE, TEMPLATE])
    assert residency.wait("other", [TEMPLATE])
    assert residency.arrived(TEMPLATE) == ["other"]
    assert residency.state(TEMPLATE) == "absent"  # the store keeps it, not this
    assert residency.arrived(ONE) == ["edit"]
    assert residency.state(ONE) == "here"
    assert not residency.wait("late", [ONE])
    residency.check_integrity()


def test_what_fails_tells_those_who_wait_and_those_who_come() -> None:
    residency = Residency(8, {"lora": 100})
    residency.reserve(ONE, 10)
    residency.wait("a", [ONE])
    residency.wait("b", [ONE, TWO])
    residency.wait("c", [TWO])
    error = EngineFailed("adapter one could not be read")
    assert residency.failed(ONE, error) == ["a", "b"]
    assert residency.nbytes("lora") == 0
    with pytest.raises(EngineFailed, match="adapter one"):
        residency.wait("d", [ONE])
    assert residency.arrived(TWO) == ["c"]
    assert residency.reserve(ONE, 10)  # tried again
    assert residency.wait("d", [ONE])


def test_waiting_is_bounded_and_who_leaves_makes_room() -> None:
    residency = Residency(1)
    residency.wait("a", [TEMPLATE])
    with pytest.raises(Overloaded, match="1 edits wait for their template"):
        residency.wait("b", [TEMPLATE])
    residency.leave("a")
    assert residency.wait("b", [TEMPLATE])
    assert residency.arrived(TEMPLATE) == ["b"]
    residency.leave("b")


def test_the_least_valuable_goes_and_nothing_that_is_pinned() -> None:
    resources: list[Resource] = []
    residency = Residency(8, {"lora": 100}, resources.append)
    for key, score in ((ONE, 1.0), (TWO, 2.0)):
        residency.reserve(key, 40, score)
        residency.arrived(key)
    assert not residency.reserve(BIG, 60, 0.5)  # worth less than what is here
    residency.pin(ONE)
    residency.pin(ONE)
    residency.unpin(ONE)
    assert residency.reserve(BIG, 60, 3.0)
    assert resources == [TWO]
    assert residency.state(TWO) == "absent"
    assert not residency.reserve(TWO, 101, 9.0)
    residency.unpin(ONE)
    residency.drop(BIG)  # on its way: it stays
    assert residency.state(BIG) == "coming"
    residency.check_integrity()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60), st.integers(0, 3), st.booleans())))
def test_no_order_of_events_passes_the_budget(
    events: list[tuple[int, int, int, bool]],
) -> None:
    residency = Residency(4, {"lora": 100})
    for name, nbytes, score, ends in events:
        resource = Resource("lora", str(name))
        if residency.state(resource) == "coming" and ends:
            residency.arrived(resource)
        elif not residency.reserve(resource, nbytes, float(score)):
            assert residency.state(resource) in ("absent", "failed")
        residency.check_integrity()


def test_of_those_who_may_wait_each_key_has_a_share() -> None:
    residency = Residency(4)
    for number in range(2):
        residency.wait(f"greedy!{number}", [TEMPLATE])
    with pytest.raises(Overloaded, match="2 edits of this key wait for their template"):
        residency.wait("greedy!2", [TEMPLATE])
    assert residency.wait("modest!one", [TEMPLATE])
