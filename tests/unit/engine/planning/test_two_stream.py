"""The recursion of both streams, its steady state, and what a plan says it loads."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from maskserve_engine.planning.flops import KINDS
from maskserve_engine.planning.two_stream import StepCosts, actions, evaluate, items_of, period, run
from tests.support.examples import examples
from tests.support.planning import INF, costs_of, random_costs, simulate

small = st.integers(0, 6)
programs = st.lists(st.tuples(small, small, small), min_size=1, max_size=5)
budgets = st.one_of(st.just(1000), st.integers(0, 12))


@examples(150)
@given(programs, small, budgets)
def test_steps_from_nothing_are_what_the_simulation_takes(
    steps: list[tuple[int, int, int]], after: int, ahead: int
) -> None:
    ends = simulate(steps, after, ahead, 4)
    lead, clock = 0.0, 0.0
    for end in ends:
        f, t = run(steps, after, ahead, lead)
        clock, lead = clock + t, t - f
        assert clock == pytest.approx(end)


@examples(150)
@given(programs, small, budgets)
def test_the_period_is_where_the_simulation_settles(
    steps: list[tuple[int, int, int]], after: int, ahead: int
) -> None:
    settled, span = 60, 40
    ends = simulate(steps, after, ahead, settled + span)
    rate, lead = period(steps, after, ahead)
    assert rate == pytest.approx((ends[-1] - ends[settled - 1]) / span)
    f, t = run(steps, after, ahead, lead)
    assert t == pytest.approx(rate)
    assert f <= rate - lead + 1e-9 or lead == ahead


@examples(100)
@given(random_costs(), st.data())
def test_a_plan_is_the_sum_of_its_parts(costs: StepCosts, data: st.DataObject) -> None:
    n = len(costs.compute)
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=n, max_size=n))
    plan = evaluate(costs, kinds, lead=0.0)
    assume(plan.load < INF)
    compute = sum(costs.compute[i, KINDS.index(k)] for i, k in enumerate(kinds))
    assert plan.compute == compute + costs.before.sum() + costs.after
    load = sum(
        costs.loads[i, ("h", "kv").index(x)] for i, x in enumerate(plan.loads) if x != "none"
    )
    assert plan.load == load + sum(costs.ends[i] for i in plan.end_restores)
    assert plan.latency == plan.compute + plan.stall
    assert max(plan.compute, plan.load) <= plan.latency <= plan.compute + plan.load
    steady = evaluate(costs, kinds)
    assert max(plan.compute, plan.load) - 1e-9 <= steady.latency <= plan.latency + 1e-9


def test_what_each_block_loads() -> None:
    costs = costs_of([[9, 5, 1]] * 7, [[2, 4]] * 7)
    kinds = ["project", "project", "kv", "dense", "dense", "project", "dense"]
    plan = evaluate(costs, kinds, lead=0.0)
    # The start and a dense block leave inactive states behind; `project` and `kv` do not.
    assert plan.loads == ("none", "h", "kv", "h", "none", "none", "h")
    assert plan.restores == (3, 6)
    assert plan.end_restores == ()
    assert plan.load == 2 + 4 + 2 + 2


def test_a_stack_that_needs_its_inactive_output_loads_it_unless_it_is_there() -> None:
    costs = costs_of([[9, 5, 1]] * 3, [[2, 4]] * 3, ends=[7, -1, 7])
    plan = evaluate(costs, ["project", "project", "dense"], lead=0.0)
    # Block 0 ends a stack without inactive output; so block 1 finds it present and is free.
    assert plan.loads == ("none", "none", "h")
    assert plan.end_restores == (0,)
    assert evaluate(costs, ["dense", "kv", "kv"], lead=0.0).end_restores == (2,)


def test_a_lead_takes_the_first_load_off_and_no_more_than_the_budget() -> None:
    costs = costs_of([[9, 9, 1]], [[INF, 4]], ahead=3)
    assert evaluate(costs, ["kv"], lead=0.0).latency == 5
    assert evaluate(costs, ["kv"], lead=2.0).latency == 3
    assert evaluate(costs, ["kv"], lead=100.0).latency == 2


def test_a_budget_makes_late_loads_wait() -> None:
    blocks, loads = [[5, 5, 1]] * 2, [[INF, INF], [INF, 6]]
    free = evaluate(costs_of(blocks, loads), ["dense", "kv"], lead=0.0)
    assert (free.latency, free.stall) == (7, 1)
    tight = evaluate(costs_of(blocks, loads, ahead=2), ["dense", "kv"], lead=0.0)
    assert (tight.latency, tight.stall) == (10, 4)


def test_steady_streams_wait_only_for_the_longer_one() -> None:
    costs = costs_of([[9, 9, 3]] * 4, [[INF, 2]] * 4)
    assert evaluate(costs, ["kv"] * 4).latency == 12
    assert evaluate(costs, ["kv"] * 4, lead=0.0).latency == 14
    costs = costs_of([[9, 9, 2]] * 4, [[INF, 3]] * 4)
    assert evaluate(costs, ["kv"] * 4).latency == 12


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="compute"):
        costs_of([[1, 1, INF]], [[1, 1]])
    with pytest.raises(ValueError, match="before"):
        costs_of([[1, 1, 1]], [[1, 1]], before=[-1])
    with pytest.raises(ValueError, match="head_start"):
        costs_of([[1, 1, 1]], [[1, 1]], ahead=-1)
    with pytest.raises(ValueError, match="loads: shape"):
        costs_of([[1, 1, 1]], [[1, 1, 1]])
    with pytest.raises(ValueError, match="kinds"):
        evaluate(costs_of([[1, 1, 1]], [[1, 1]]), ["kv", "kv"])


def test_items_follow_the_order_of_work() -> None:
    costs = costs_of([[3, 2, 1]] * 2, [[4, 8]] * 2, before=[5, 6], ends=[-1, 7])
    assert actions(items_of(costs), [2, 1]) == [(5, 8, 1), (6, 4, 2), (0, 7, 0)]
