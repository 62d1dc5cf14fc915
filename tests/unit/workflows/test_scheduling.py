"""Which nodes run where: Algorithm 1 by hand, ours by its rules, predictions by brute force."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from maskserve_workflows.scheduling import (
    ORDERS,
    NodePlace,
    Prices,
    ReadyNode,
    admits,
    algorithm_1,
    decide,
    in_pieces,
    predicted,
)
from tests.support.examples import examples

DM, CN, TEXT = frozenset({"dm"}), frozenset({"cn"}), frozenset({"text"})
PRICES = Prices({"dm": 2.0, "cn": 1.0, "text": 3.0}, byte_s=0.125, shared=0.0)


def ready(key, arrival, depth, run_s, models, **more):
    return ReadyNode(key, arrival, depth, math.inf, run_s, models=models, **more)


def test_three_cycles_of_algorithm_1_by_hand():
    places = [
        NodePlace("a", 0.0, DM),
        NodePlace("b", 0.0, TEXT),
        NodePlace("c", 0.0, CN),
        NodePlace("d", 9.0, DM),
    ]
    waiting = [
        ready("late text", 2.0, 0, (1.0,), TEXT, together=8),
        ready("text", 1.0, 0, (1.0,), TEXT, together=8),
        ready("deep text", 1.0, 5, (1.0,), TEXT, together=8),
        ready("step", 1.0, 1, (4.0, 2.0), DM, inputs={"b": 8}),
        ready("net", 0.0, 9, (1.0,), CN),
    ]
    # The first by arrival is the net, however deep; only `c` has its model.
    first = algorithm_1(waiting, places, PRICES, 0.0)
    assert [n.key for n in first.nodes] == ["net"]
    assert first.places == ("c",)
    assert (first.before_s, first.run_s) == (0.0, 1.0)
    places[2] = NodePlace("c", 1.0, CN)
    # Then the shallowest of those that came at 1: a call with all texts, three times as long.
    second = algorithm_1(waiting[:4], places, PRICES, 0.0)
    assert [n.key for n in second.nodes] == ["text", "deep text", "late text"]
    assert second.places == ("b",)
    assert (second.before_s, second.run_s) == (0.0, 3.0)
    places[1] = NodePlace("b", 1.0, TEXT)
    # The step would have two devices, and one idles: `a`, to which 8 bytes come from `b`.
    third = algorithm_1(waiting[3:4], places, PRICES, 0.0)
    assert third.places == ("a",)
    assert (third.before_s, third.run_s) == (1.0, 4.0)
    # With all idle it has both that score least: `b` has the bytes and loads for 2 s, `a` and `d`
    # fetch for 1 s.
    idle = [NodePlace(p.name, 0.0, p.models) for p in places]
    assert algorithm_1(waiting[3:4], idle, PRICES, 0.0).places == ("a", "d")
    assert algorithm_1(waiting, [NodePlace("a", 1.0)], PRICES, 0.0) is None
    assert algorithm_1([], idle, PRICES, 0.0) is None


def test_the_least_slack_begins_and_what_cannot_be_in_time_is_told():
    nodes = [
        ReadyNode("easy", 0.0, 0, 90.0, (1.0,)),
        ReadyNode("tight", 1.0, 0, 9.0, (1.0,), chain_s=4.0),
        ReadyNode("lost", 0.0, 0, 4.0, (3.0,), chain_s=2.0),
    ]
    started_nodes, late = decide(nodes, [NodePlace("a", 0.0)], Prices(), 1.0)
    assert [(d.nodes[0].key, d.places) for d in started_nodes] == [("tight", ("a",))]
    assert [node.key for node in late] == ["lost"]
    started_nodes, _ = decide(nodes, [NodePlace("a", 0.0)], Prices(), 1.0, ORDERS["fcfs"])
    assert started_nodes[0].nodes[0].key == "easy"


def test_devices_go_to_whom_the_due_time_makes_need_them_and_not_where_others_wait():
    def degrees(nodes, idle, busy=0):
        places = [NodePlace(f"i{n}", 0.0) for n in range(idle)] + [
            NodePlace(f"b{n}", 9.0) for n in range(busy)
        ]
        begun, _ = decide(nodes, places, Prices(), 0.0)
        return [len(dispatch.places) for dispatch in begun]

    hurried = ReadyNode("x", 0.0, 0, 3.0, (4.0, 2.0))
    calm = ReadyNode("y", 0.0, 0, 9.0, (4.0, 2.0))
    assert degrees([hurried], 2, 2) == [2]
    assert degrees([calm], 2, 2) == [1]
    assert degrees([calm], 3, 1) == [2]
    assert degrees([hurried, calm], 3, 0) == [2, 1]


def test_a_node_waits_for_the_place_that_has_its_model_if_that_is_sooner():
    node = ReadyNode("x", 0.0, 0, math.inf, (1.0,), models=DM)
    soon, idle = NodePlace("soon", 1.5, DM), NodePlace("idle", 0.0)
    assert decide([node], [soon, idle], PRICES, 0.0) == ([], [])
    begun, _ = decide([node], [NodePlace("later", 2.5, DM), idle], PRICES, 0.0)
    assert begun[0].places == ("idle",)
    assert begun[0].before_s == 2.0


sixteenths = st.integers(1, 64).map(lambda n: n / 16)


@st.composite
def lefts(draw):
    return [
        ReadyNode(
            str(number),
            draw(sixteenths),
            0,
            draw(sixteenths) * 4,
            (draw(sixteenths),),
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
        key=lambda some: [(n.due - now - n.chain_s - n.run_s[0], n.arrival) for n in some],
    )
    ends, busy = {}, list(free)
    for node in by_slack:
        last = 0.0
        for _ in range(node.at_once):
            device = min(range(len(busy)), key=lambda d: (max(busy[d], now), d))
            busy[device] = max(busy[device], now) + node.run_s[0]
            last = max(last, busy[device])
        ends[node.key] = last + node.chain_s
    places = [NodePlace(str(n), at) for n, at in enumerate(free)]
    assert predicted(nodes, places, Prices(), now) == ends
    if nodes:
        *admitted, new = nodes
        ends_before = predicted(admitted, places, Prices(), now)
        harmed = any(ends_before[n.key] <= n.due < ends[n.key] for n in admitted)
        admitted_at = admits(new, admitted, places, Prices(), now)
        assert admitted_at == (None if harmed or ends[new.key] > new.due else ends[new.key])


def test_a_plan_is_refused_for_what_it_makes_late_and_not_for_what_is_late_anyway():
    """By hand: one place; the new one has the least slack and goes first."""
    new = ReadyNode("new", 0.0, 0, 2.5, (2.0,))
    lost = ReadyNode("lost", 0.0, 0, 1.0, (2.0,))
    harmed = ReadyNode("harmed", 0.0, 0, 9.0, (8.0,))
    calm = ReadyNode("calm", 0.0, 0, 99.0, (8.0,))
    fifo, place = ORDERS["fcfs"], [NodePlace("a", 0.0)]
    first = ReadyNode("first", -1.0, 0, 2.5, (2.0,))

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


@given(sixteenths, sixteenths)
@examples(50)
def test_pieces_of_what_is_left_make_up_its_path_and_its_work(path, work):
    pieces = in_pieces("x", 0.0, 9.0, max(path, work / 16), work)
    assert math.isclose(pieces.at_once * pieces.run_s[0], work)
    assert math.isclose(pieces.run_s[0] + pieces.chain_s, max(path, work / 16))
