"""Order, admission and predictions by brute force."""

import itertools
import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from maskserve_workflows.scheduling import (
    ORDERS,
    NodePlace,
    Prices,
    ReadyNode,
    admits,
    in_pieces,
    predicted_ends,
)
from tests.support.examples import examples

sixteenths = st.integers(1, 64).map(lambda n: n / 16)


@st.composite
def lefts(draw):
    return [
        ReadyNode(
            str(number),
            draw(sixteenths),
            draw(sixteenths) * 4,
            draw(sixteenths),
            draw(sixteenths),
            at_once=draw(st.integers(1, 3)),
        )
        for number in range(draw(st.integers(0, 4)))
    ]


@given(lefts(), st.lists(sixteenths, min_size=1, max_size=4), sixteenths)
@examples(1000)
def test_slack_order_and_predicted_ends_are_those_of_brute_force(nodes, free, now):
    by_slack = min(
        itertools.permutations(nodes),
        key=lambda some: [(n.due - now - n.chain_s - n.run_s, n.arrival) for n in some],
    )
    ends, busy = {}, list(free)
    for node in by_slack:
        last = 0.0
        for _ in range(node.at_once):
            device = min(range(len(busy)), key=lambda d: (max(busy[d], now), d))
            busy[device] = max(busy[device], now) + node.run_s
            last = max(last, busy[device])
        ends[node.key] = last + node.chain_s
    places = [NodePlace(str(n), at) for n, at in enumerate(free)]
    assert predicted_ends(nodes, places, Prices(), now) == ends
    if nodes:
        *admitted, new = nodes
        ends_before = predicted_ends(admitted, places, Prices(), now)
        harmed = any(ends_before[n.key] <= n.due < ends[n.key] for n in admitted)
        admitted_at = admits(new, admitted, places, Prices(), now)
        assert admitted_at == (None if harmed or ends[new.key] > new.due else ends[new.key])


def test_a_plan_is_refused_for_what_it_makes_late_and_not_for_what_is_late_anyway():
    """By hand: one place; the new one has the least slack and goes first."""
    new = ReadyNode("new", 0.0, 2.5, 2.0)
    lost = ReadyNode("lost", 0.0, 1.0, 2.0)
    harmed = ReadyNode("harmed", 0.0, 9.0, 8.0)
    calm = ReadyNode("calm", 0.0, 99.0, 8.0)
    fifo, place = ORDERS["fcfs"], [NodePlace("a", 0.0)]
    first = ReadyNode("first", -1.0, 2.5, 2.0)

    def ends(new, *admitted, order=fifo):
        return admits(new, admitted, place, Prices(), 0.0, order)

    # `lost` is late with it and without it; what is not is not harmed.
    assert ends(first, lost) == 2.0
    assert ends(first, lost, calm) == 2.0
    # It alone makes `harmed` late, whatever else is late.
    assert ends(first, harmed) is None
    assert ends(first, lost, harmed) is None
    assert ends(first, harmed, lost) is None
    assert ends(new, calm) is None  # behind it: it would be late itself


def test_a_model_that_a_node_loads_is_there_for_the_next():
    """By hand: 5 s for the model, then 1 s each."""
    nodes = [
        ReadyNode(name, at, 99.0, 1.0, models=frozenset({"m"})) for at, name in ((0, "a"), (1, "b"))
    ]
    prices = Prices(load_s={"m": 5.0})
    assert predicted_ends(nodes, [NodePlace("one", 0.0)], prices, 0.0) == {"a": 6.0, "b": 7.0}
    # Where it is loaded already, a free place without it is no better.
    places = [NodePlace("one", 2.0, frozenset({"m"})), NodePlace("two", 0.0)]
    assert predicted_ends(nodes[:1], places, prices, 0.0) == {"a": 3.0}


def test_a_node_runs_only_where_it_may():
    node = ReadyNode("a", 0.0, 99.0, 1.0, only=frozenset({"late"}))
    places = [NodePlace("free", 0.0), NodePlace("late", 7.0)]
    assert predicted_ends([node], places, Prices(), 0.0) == {"a": 8.0}
    assert predicted_ends([replace(node, only=frozenset({"none"}))], places, Prices(), 0.0) == {
        "a": math.inf
    }


def test_inputs_are_fetched_from_other_places_alone():
    node = ReadyNode("a", 0.0, 99.0, 1.0, inputs={"near": 30, "far": 10})
    prices, near, far = Prices(byte_s=0.1), NodePlace("near", 0.0), NodePlace("far", 0.0)
    assert [prices.score(node, place, 0.0) for place in (near, far)] == [2.0, 4.0]
    assert predicted_ends([node], [far, near], prices, 0.0) == {"a": 2.0}


@given(sixteenths, sixteenths)
@examples(50)
def test_pieces_of_what_is_left_make_up_its_path_and_its_work(path, work):
    pieces = in_pieces("x", 0.0, 9.0, max(path, work / 16), work)
    assert math.isclose(pieces.at_once * pieces.run_s, work)
    assert math.isclose(pieces.run_s + pieces.chain_s, max(path, work / 16))
