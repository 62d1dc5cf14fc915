"""Which nodes begin where: Algorithm 1 by hand, and our rule beside the router's own choice."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskserve_common.contracts.pricing import Pricing
from maskserve_common.routing.policies import MaskAware
from maskserve_common.routing.predict import predicted_seconds
from maskserve_common.routing.profile import RowLoad
from maskserve_common.routing.view import Edit, WorkerView
from maskserve_studies.workflow_plans.dispatch import PrintedNode, algorithm_1, decide
from maskserve_workflows.scheduling import ORDERS, NodePlace, Prices, ReadyNode
from tests.support.examples import examples

DM, CN, TEXT = frozenset({"dm"}), frozenset({"cn"}), frozenset({"text"})
PRICES = Prices({"dm": 2.0, "cn": 1.0, "text": 3.0}, byte_s=0.125)


def ready(key, arrival, depth, degrees_s, models, **more):
    return PrintedNode(
        key, arrival, math.inf, degrees_s[0], 0.0, models, depth=depth, degrees_s=degrees_s, **more
    )


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
    # Then the shallowest of those that came at 1: a call with all texts, 2.8 times as long.
    second = algorithm_1(waiting[:4], places, PRICES, 0.0)
    assert [n.key for n in second.nodes] == ["text", "deep text", "late text"]
    assert second.places == ("b",)
    assert (second.before_s, second.run_s) == (0.0, pytest.approx(2.8))
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
        ReadyNode("easy", 0.0, 90.0, 1.0),
        ReadyNode("tight", 1.0, 9.0, 1.0, chain_s=4.0),
        ReadyNode("lost", 0.0, 4.0, 3.0, chain_s=2.0),
    ]
    started_nodes, late = decide(nodes, [NodePlace("a", 0.0)], Prices(), 1.0)
    assert [(d.nodes[0].key, d.places) for d in started_nodes] == [("tight", ("a",))]
    assert [node.key for node in late] == ["lost"]
    started_nodes, _ = decide(nodes, [NodePlace("a", 0.0)], Prices(), 1.0, ORDERS["fcfs"])
    assert started_nodes[0].nodes[0].key == "easy"


def test_a_node_waits_for_the_place_that_has_its_model_if_that_is_sooner():
    node = ReadyNode("x", 0.0, math.inf, 1.0, models=DM)
    soon, idle = NodePlace("soon", 1.5, DM), NodePlace("idle", 0.0)
    assert decide([node], [soon, idle], PRICES, 0.0) == ([], [])
    begun, _ = decide([node], [NodePlace("later", 2.5, DM), idle], PRICES, 0.0)
    assert begun[0].places == ("idle",)
    assert begun[0].before_s == 2.0


sixteenths = st.integers(1, 64).map(lambda n: n / 16)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 50), sixteenths)
@examples(200)
def test_of_workers_of_one_row_the_router_and_the_score_choose_the_same(steps_left, steps, step_s):
    """Dense edits; each worker has a row with so many steps left, or none."""
    pricing = Pricing(step=0.0, dense_row=step_s, cached_row=0.0, active_token=0.0, tokens=64)
    views, places = [], []
    for number, left in enumerate(steps_left):
        name = f"w{number}"
        running = (RowLoad(left, step_s, 0.0, 64),) if left else ()
        views.append(WorkerView(name, pricing, 1, 4, running))
        places.append(NodePlace(name, left * step_s))
    edit = Edit(steps, 64, 64, cache=False)
    node = ReadyNode("edit", 0.0, math.inf, steps * step_s)
    best = min(places, key=lambda place: (Prices().score(node, place, 0.0), place.name))
    assert MaskAware().choose(edit, views, 0.0) == best.name
    assert predicted_seconds(edit, views[int(best.name[1:])], 0.0) == Prices().score(
        node, best, 0.0
    )
