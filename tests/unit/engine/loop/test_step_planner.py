"""Plans of the step loop: what is chosen when, and costs that follow what was measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from maskserve_common.line_fit import Line
from maskserve_engine.cache.entries import PARTS
from maskserve_engine.cache.loader import Arrival, Load, Selection
from maskserve_engine.families.flux.spec import flux_work
from maskserve_engine.loop.measured_costs import MeasuredCosts
from maskserve_engine.loop.step_planner import PlannedRow, StepPlanner, parts_of
from maskserve_engine.planning.cost_model import CostModel
from maskserve_engine.planning.flops import RowTokens
from tests.fakes.entries import random_entry
from tests.support.model_configs import TINY_FLUX

pytestmark = pytest.mark.each_value

TOKENS, BLOCKS = 16, 5
WORK = flux_work({**TINY_FLUX, "num_layers": 2, "num_single_layers": 3}, 8, 8)
SELECTION = Selection([np.arange(4, TOKENS)])
FAST, SLOW = 1e-15, 1e-6


def new_load(parts: tuple[str, ...] = ("h", "kv")) -> Load:
    entry = random_entry(0, blocks=BLOCKS, tokens=TOKENS, parts=parts)
    return Load(entry, "host", SELECTION)


def arrive(load: Load, blocks: range) -> None:
    for block in blocks:
        for part in PARTS:
            if load.keeps((block, part)):
                load.arrive((block, part), Arrival(()))


def planner(seconds_per_byte: float) -> StepPlanner:
    model = CostModel("cpu", Line(0.0, 1e-9), {"host": Line(0.0, seconds_per_byte)})
    return StepPlanner(MeasuredCosts(model))


def reading(load: Load, stays: int = 1) -> PlannedRow:
    return PlannedRow(WORK.totals([RowTokens((4.0,), 8.0)]), (load,), stays)


def test_what_is_there_is_taken() -> None:
    load = new_load()
    arrive(load, range(BLOCKS))
    planned = planner(SLOW).plan(WORK, [reading(load)], None)
    assert planned.choice == "here"
    assert planned.plan.kinds == ("kv",) * BLOCKS


def test_loads_that_keep_up_follow_the_steady_plan() -> None:
    planned = planner(FAST).plan(WORK, [reading(new_load())], None)
    assert planned.choice == "steady"
    assert planned.plan.kinds == planned.next_plan.kinds == ("kv",) * BLOCKS
    assert parts_of(planned.plan) == [(block, "kv") for block in range(BLOCKS)]


def test_a_row_that_joins_is_planned_for_what_has_arrived() -> None:
    """Its entries serve many steps, so all are brought in; this step does not wait for them."""
    load = new_load()
    planned = planner(1e-7).plan(WORK, [reading(load, stays=1000)], None)
    assert planned.choice == "arrived"
    assert planned.plan.loads[0] == "none"  # the first block computes while others load
    assert planned.next_plan.kinds == ("kv",) * BLOCKS
    arrive(load, range(BLOCKS))
    assert planner(1e-7).plan(WORK, [reading(load, stays=1000)], None).choice == "here"


@pytest.mark.parametrize(("parts", "kind"), [(("kv",), "kv"), (("h",), "project")])
def test_a_fixed_plan_takes_what_is_kept_whatever_that_costs(
    parts: tuple[str, ...], kind: str
) -> None:
    planned = planner(SLOW).plan(WORK, [reading(new_load(parts))], None, fixed=True)
    assert planned.choice == "fixed"
    assert planned.plan.kinds == (kind,) * BLOCKS


@pytest.mark.parametrize("speed", [1e-8, 3e-8, 1e-7, 3e-7])
def test_ranks_that_share_a_step_are_planned_as_one_device_that_is_as_fast(speed: float) -> None:
    """Their loads are cut already."""
    one, faster = planner(speed), planner(speed)
    fast = replace(faster.costs.model, compute=Line(0.0, 1e-9 / 4))
    faster.costs = MeasuredCosts(fast)
    load = new_load()
    shared = one.plan(WORK, [reading(load, stays=4)], None, ranks=4)
    assert shared == faster.plan(WORK, [reading(load, stays=4)], None)


def test_ranks_that_share_a_step_compute_what_is_dearer_to_load() -> None:
    loads = {
        ranks: planner(1e-7).plan(WORK, [reading(new_load())], None, ranks=ranks).next_plan.loads
        for ranks in (1, 8)
    }
    assert loads[1].count("none") < loads[8].count("none")


@pytest.mark.parametrize("parts", [("kv",), ("h",), ("h", "kv")])
@pytest.mark.parametrize("speed", [FAST, 1e-8, 1e-7, SLOW])
def test_no_plan_asks_for_what_was_not_kept(parts: tuple[str, ...], speed: float) -> None:
    load = new_load(parts)
    planned = planner(speed).plan(WORK, [reading(load)], None)
    assert all(load.keeps(want) for want in parts_of(planned.plan))


def test_costs_follow_the_steps_and_loads_that_were_taken() -> None:
    costs = MeasuredCosts(CostModel("cpu", Line(1.0, 1.0), {"host": Line(0.0, 1.0)}))
    rng = np.random.default_rng(0)
    for flops in rng.uniform(1e9, 1e11, 320):
        costs.step(flops, 0.01 + 2e-11 * flops)
    assert costs.sequence > 0
    assert costs.model.compute.fixed == pytest.approx(0.01, rel=0.01)
    assert costs.model.compute.per_unit == pytest.approx(2e-11, rel=0.01)
    costs.moves([("host", 1e6, 2e-4)] * 64)  # all alike: the line so far, scaled
    assert costs.model.load_seconds("host", 1e6) == pytest.approx(2e-4)


def test_a_machine_that_stalls_does_not_make_steps_dearer() -> None:
    costs = MeasuredCosts(CostModel("cpu", Line(0.0, 1e-10)))
    for number in range(320):
        flops, stalled = 1e9 * (1 + number % 8), number % 3 == 0
        costs.step(flops, 1e-10 * flops * (10 if stalled else 1))
    assert costs.model.step_seconds(4e9) == pytest.approx(0.4, rel=0.05)


def test_a_step_that_waited_for_the_host_says_nothing_of_flops() -> None:
    costs = MeasuredCosts(CostModel("gpu", Line(0.0, 1e-10), launch=1e-5))
    for number in range(320):
        flops, host = 1e9 * (1 + number % 8), 0.5
        costs.step(flops, max(1e-10 * flops, host), host)
    assert costs.model.step_seconds(4e9) == pytest.approx(0.4, rel=0.05)
