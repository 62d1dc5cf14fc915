"""The planner against every plan there is, the paper's algorithm, and its own promises."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskserve_benchmarks.published_models import FLUX_DEV, SDXL
from maskserve_common.line_fit import Line
from maskserve_engine.families.flux.spec import flux_work
from maskserve_engine.families.unet.spec import unet_work
from maskserve_engine.planning.cost_model import CostModel
from maskserve_engine.planning.entry_bytes import FORMATS, block_bytes
from maskserve_engine.planning.flops import KINDS
from maskserve_engine.planning.planner import TOLERANCE, plan
from maskserve_engine.planning.two_stream import (
    Plan,
    StepCosts,
    actions,
    evaluate,
    head_start_of,
    items_of,
    period,
    run,
    step_costs,
)
from maskserve_studies.block_plans.algorithm_1 import algorithm_1
from tests.support.examples import examples
from tests.support.model_configs import TINY_SDXL
from tests.support.planning import INF, costs_of, flux_costs, random_costs

pytestmark = pytest.mark.spread("seed")

leads = st.one_of(st.none(), st.integers(0, 9).map(float))


def brute_force(costs: StepCosts, lead: float | None) -> float:
    """The least latency of all 3^n plans."""
    items, ahead, after = items_of(costs), head_start_of(costs), costs.after
    least = INF
    for kinds in itertools.product(range(3), repeat=len(costs.compute)):
        steps = actions(items, kinds)
        if lead is None:
            latency, _ = period(steps, after, ahead)
        else:
            _, latency = run(steps, after, ahead, lead)
        least = min(least, latency)
    return least


def check(costs: StepCosts, lead: float | None) -> Plan:
    solution, least = plan(costs, lead=lead, tolerance=0.0), brute_force(costs, lead)
    assert solution.latency == pytest.approx(least, rel=1e-8, abs=1e-9)
    assert solution.bound <= least * (1 + 1e-9) + 1e-9
    assert evaluate(costs, solution.kinds, lead=lead).latency == pytest.approx(solution.latency)
    return solution


@examples(250)
@given(random_costs(most=5), leads)
def test_equals_brute_force(costs: StepCosts, lead: float | None) -> None:
    check(costs, lead)


@examples(12)
@given(random_costs(most=8), leads)
def test_equals_brute_force_up_to_8_blocks(costs: StepCosts, lead: float | None) -> None:
    check(costs, lead)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("lead", [None, 0.0, 2.0])
def test_equals_brute_force_on_8_unequal_blocks(seed: int, lead: float | None) -> None:
    rng = np.random.default_rng(seed)
    compute = -np.sort(-rng.random((8, 3)) * [4, 2, 1], axis=1)
    h = rng.random(8) * rng.choice([0.5, 1.5, 4.0])
    costs = StepCosts(
        compute,
        np.stack((h, 2 * h), axis=1),
        rng.random(8) * 0.2,
        0.1,
        np.where(np.arange(8) % 4 == 3, h, -1.0) if seed % 2 else np.full(8, -1.0),
        [INF, 3.0, 0.7, 0.0][seed % 4],
    )
    check(costs, lead)


@pytest.mark.parametrize(("lead", "latency"), [(None, 6.0), (0.0, 9.0), (3.0, 6.0)])
def test_equals_brute_force_where_a_dense_block_precedes_one_that_projects(
    lead: float | None, latency: float
) -> None:
    """The states of cached tokens are there then, so the bound of their loads does not hold."""
    costs = StepCosts(
        np.array([[6.0, 4.0, 1.0], [2.0, 0.0, 0.0], [6.0, 1.0, 1.0]]),
        np.array([[5.0, 1.0], [5.0, 2.0], [8.0, 6.0]]),
        np.array([0.0, 1.0, 0.0]),
        head_start=4.0,
    )
    assert check(costs, lead).latency == latency


@examples(60)
@given(random_costs(most=7), leads, st.sampled_from([0.01, 0.1, 0.5]))
def test_a_tolerance_is_kept(costs: StepCosts, lead: float | None, tolerance: float) -> None:
    exact = plan(costs, lead=lead, tolerance=0.0).latency
    solution = plan(costs, lead=lead, tolerance=tolerance)
    assert solution.latency <= exact * (1 + tolerance) * (1 + 1e-8) + 1e-9
    assert solution.bound <= exact * (1 + 1e-8) + 1e-9


@examples(60)
@given(random_costs(most=6), leads)
def test_few_intervals_still_give_an_honest_bound(costs: StepCosts, lead: float | None) -> None:
    exact = plan(costs, lead=lead, tolerance=0.0).latency
    quick = plan(costs, lead=lead, tolerance=0.0, intervals=0)
    assert quick.bound <= exact * (1 + 1e-8) + 1e-9
    assert quick.latency >= exact * (1 - 1e-8) - 1e-9


# --- The paper's Algorithm 1 as the yardstick. ------------------------------------------------


def paper_plan(costs: StepCosts, kind: str) -> list[str]:
    """The plan of Algorithm 1 when its cached blocks run as `kind`."""
    column, load = KINDS.index(kind), {"project": 0, "kv": 1}[kind]
    use, _ = algorithm_1(costs.compute[:, column], costs.compute[:, 0], costs.loads[:, load])
    return [kind if cached else "dense" for cached in use]


@examples(150)
@given(random_costs(most=12), leads)
def test_never_worse_than_algorithm_1(costs: StepCosts, lead: float | None) -> None:
    latency = plan(costs, lead=lead, tolerance=0.0).latency
    for kind in ("project", "kv"):
        paper_latency = evaluate(costs, paper_plan(costs, kind), lead=lead).latency
        assert latency <= paper_latency * (1 + 1e-8) + 1e-9


def test_algorithm_1_is_greedy_and_loses_on_unequal_blocks() -> None:
    # It takes block 0 from the cache, because 3 + 1 is no later than 4, and makes block 1, where
    # the cache saves far more, wait for it: 3 + 8 + 1 = 12. Computing block 0 gives 8 + 1 = 9.
    costs = costs_of([[4, 4, 1], [10, 10, 1]], [[INF, 3], [INF, 8]])
    use, promised = algorithm_1([1, 1], [4, 10], [3, 8])
    assert (use, promised) == ([True, True], 12)
    assert evaluate(costs, ["kv", "kv"], lead=0.0).latency == 12
    assert plan(costs, lead=0.0, tolerance=0.0).latency == 9


def test_algorithm_1_loses_on_equal_blocks_too() -> None:
    # Equal blocks, as in the paper's one C and L per model. Its last two blocks wait for loads
    # that block 1 took first.
    costs = costs_of([[4, 4, 1]] * 4, [[INF, 3]] * 4)
    use, promised = algorithm_1([1] * 4, [4] * 4, [3] * 4)
    assert promised == evaluate(costs, ["kv" if u else "dense" for u in use], lead=0.0).latency
    assert plan(costs, lead=0.0, tolerance=0.0).latency < promised


def test_a_restore_that_algorithm_1_does_not_see() -> None:
    # Its plan computes a block after a cached one as if inactive states were there.
    costs = costs_of([[2, 1, 1], [2, 2, 2]], [[1, 1], [5, 9]])
    paper_kinds = paper_plan(costs, "kv")
    assert paper_kinds == ["kv", "dense"]
    _, promised = algorithm_1([1, 2], [2, 2], [1, 9])
    assert promised == 4
    assert evaluate(costs, paper_kinds, lead=0.0).latency == 1 + 5 + 2
    assert plan(costs, lead=0.0, tolerance=0.0).latency == 4


# --- Real models. -----------------------------------------------------------------------------


def test_flux_kinds_follow_the_link() -> None:
    fast, middle, slow = (plan(flux_costs(rate)).kinds for rate in (1000, 50, 5))
    assert set(fast) == {"kv"}
    assert set(middle) == {"kv", "project"}
    assert "dense" in slow
    # With nothing to load from, everything is computed.
    assert set(plan(flux_costs(1e-6)).kinds) <= {"dense", "project"}


@pytest.mark.parametrize("gbytes", [7, 14, 25, 50])
@pytest.mark.parametrize("fmt", ["bfloat16", "int8"])
def test_flux_plans_are_proved_and_beat_every_plain_one(gbytes: float, fmt: str) -> None:
    costs = flux_costs(gbytes, fmt, (0.04, 0.09, 0.11, 0.2), budget_bytes=2e9)
    solution = plan(costs)
    assert solution.latency <= solution.bound * (1 + TOLERANCE) * (1 + 1e-9)
    for kind in KINDS:
        assert solution.latency <= evaluate(costs, [kind] * 57).latency * (1 + TOLERANCE)
    for kind in ("project", "kv"):
        latency = evaluate(costs, paper_plan(costs, kind)).latency
        assert solution.latency <= latency * (1 + TOLERANCE)


def test_a_tighter_budget_is_never_better() -> None:
    latencys = [
        plan(flux_costs(25, masks=(0.11,) * 4, budget_bytes=b), tolerance=1e-4).latency
        for b in (4e9, 4e8, 2e8, 1e8)
    ]
    assert all(a <= b * (1 + 2e-4) for a, b in itertools.pairwise(latencys))


def test_unet_stacks_end_restored() -> None:
    work = unet_work(TINY_SDXL, 64, 64)
    row = work.row_at(0.1, 77)
    loads = block_bytes(
        work, [tuple(n - a for n, a in zip(work.tokens, row.active, strict=True))], FORMATS["int8"]
    )
    model = CostModel("x", Line(1e-4, 1e-12), {"host": Line(0.0, 1e-11)}, "estimate")
    costs = step_costs(work, work.totals([row]), model, {"host": loads})
    solution = plan(costs)
    for end in work.ends.tolist():
        assert (end in solution.end_restores) != (solution.kinds[end] == "dense")
    assert solution.compute == pytest.approx(
        model.compute.fixed
        + 1e-12
        * (
            work.fixed_flops(work.totals([row])).sum()
            + sum(
                work.block_flops(work.totals([row]))[i, KINDS.index(k)]
                for i, k in enumerate(solution.kinds)
            )
        )
    )


def test_dense_rows_beside_give_the_loads_their_time() -> None:
    work = flux_work(FLUX_DEV, 128, 128)
    model = CostModel("x", Line(0.0, 2e-15), {"host": Line(0.0, 4e-11)}, "estimate")
    row = work.row_at(0.1, 512)
    loads = {"host": block_bytes(work, [(4096 - row.active[0],)], FORMATS["bfloat16"])}
    cached = work.totals([row])
    alone = plan(step_costs(work, cached, model, loads))
    mixed_plan = plan(step_costs(work, cached, model, loads, dense=work.totals([row])))
    assert alone.kinds.count("kv") < 57
    assert mixed_plan.kinds.count("kv") == 57
    dense_step = 2e-15 * work.step_flops([row], "dense")
    assert mixed_plan.compute == pytest.approx(dense_step + 2e-15 * work.step_flops([row], "kv"))


def test_loads_that_take_no_time_need_no_budget() -> None:
    """No bound on the bytes times no seconds per byte is no bound, not NaN."""
    work = flux_work(FLUX_DEV, 128, 128)
    model = CostModel("x", Line(0.0, 2e-15), {"device": Line(0.0, 0.0)})
    row = work.row_at(0.1, 512)
    moved = block_bytes(work, [(3000.0,)], FORMATS["bfloat16"])
    costs = step_costs(work, work.totals([row]), model, {"device": moved})
    assert costs.head_start == math.inf
    assert plan(costs).kinds == ("kv",) * 57


def test_bytes_of_two_tiers_add_up_and_unknown_tiers_are_refused() -> None:
    work = flux_work(FLUX_DEV, 128, 128)
    model = CostModel("x", Line(0.0, 2e-15), {"host": Line(1e-5, 1e-10), "disk": Line(0.0, 1e-9)})
    row = work.row_at(0.1, 512)
    moved = block_bytes(work, [(3000.0,)], FORMATS["bfloat16"])
    costs = step_costs(
        work, work.totals([row, row]), model, {"host": moved, "disk": moved}, budget_bytes=1e9
    )
    h = 3000 * 3072 * 2
    assert costs.loads[3].tolist() == pytest.approx([1e-5 + 1.1e-9 * h, 1e-5 + 2.2e-9 * h])
    # A budget holds as many seconds as its bytes take at the step's mean rate.
    assert costs.head_start == pytest.approx(1e9 * costs.loads[:, 1].sum() / (2 * 57 * 2 * h))
    with pytest.raises(ValueError, match="remote"):
        step_costs(work, work.totals([row]), model, {"remote": moved})


@examples(100)
@given(random_costs(most=5), leads, st.integers(0, 20), st.data())
def test_no_plain_plan_and_no_plan_of_the_device_alone_is_faster_where_the_host_is_slow(
    costs: StepCosts, lead: float | None, fixed: int, data: st.DataObject
) -> None:
    numbers = st.lists(st.integers(0, 9), min_size=3, max_size=3)
    n = len(costs.compute)
    launching = np.array(data.draw(st.lists(numbers, min_size=n, max_size=n)), dtype=float)
    slow = replace(costs, launching=launching, launching_fixed=float(fixed))
    solution = plan(slow, lead=lead, tolerance=0.0)
    assert solution.host == slow.host([KINDS.index(kind) for kind in solution.kinds])
    assert solution.latency >= solution.host
    launched = replace(costs, compute=np.maximum(costs.compute, launching))
    searched = [plan(device, lead=lead, tolerance=0.0).kinds for device in (costs, launched)]
    alternatives = [*searched, *((kind,) * n for kind in KINDS)]
    for kinds in alternatives:
        assert solution.latency <= evaluate(slow, kinds, lead=lead).latency


@pytest.mark.parametrize(("peak", "kind"), [(0.5e15, "kv"), (1.5e15, "dense")])
def test_a_device_that_is_faster_than_the_host_computes_all_tokens(peak: float, kind: str) -> None:
    """SDXL at a mask ratio of 0.11: cached it takes a third of the work and more kernels."""
    work = unet_work(SDXL, 128, 128, guidance=False)
    model = CostModel("gpu", Line(0.0, 1 / peak), {"device": Line(0.0, 0.0)}, launch=6e-6)
    loads = {"device": np.zeros((len(work.blocks), 2))}
    costs = step_costs(work, work.totals([work.row_at(0.11, 77)]), model, loads)
    solution = plan(costs, lead=0.0)
    assert solution.kinds == (kind,) * len(work.blocks)
    assert solution.latency == max(solution.compute, solution.host)
