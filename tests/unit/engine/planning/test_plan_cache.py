"""Plans by quantised totals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from maskserve_benchmarks.published_models import FLUX_DEV
from maskserve_engine.families.flux.spec import flux_work
from maskserve_engine.planning.flops import LoraFlops
from maskserve_engine.planning.planner import PlanCache, plan, plan_totals
from maskserve_engine.planning.two_stream import StepCosts, evaluate
from tests.support.planning import flux_costs


class Builder:
    """Makes costs and counts how often."""

    def __init__(self, mask: float) -> None:
        self.mask = mask
        self.calls = 0

    def __call__(self) -> StepCosts:
        self.calls += 1
        return flux_costs(25, masks=(self.mask,), budget_bytes=2e9)


def totals(mask: float) -> tuple[float, ...]:
    work = flux_work(FLUX_DEV, 128, 128)
    cached = work.totals([work.row_at(mask, 512)])
    return plan_totals(cached, {"host": 4096 - cached.active[0]})


def test_equal_and_close_totals_share_a_plan_and_far_ones_do_not() -> None:
    cache, builder = PlanCache(), Builder(0.11)
    first = cache.get("flux", totals(0.11), builder)
    assert cache.get("flux", totals(0.11), builder) is first
    assert cache.get("flux", totals(0.1101), builder) is first
    assert builder.calls == 1
    assert (cache.hits, cache.misses, len(cache)) == (2, 1, 1)
    cache.get("flux", totals(0.2), builder)
    cache.get("sdxl", totals(0.11), builder)
    assert builder.calls == 3


def test_more_rows_are_another_plan_even_at_equal_tokens() -> None:
    work, cache, builder = flux_work(FLUX_DEV, 128, 128), PlanCache(), Builder(0.1)
    one = work.totals([work.row_at(0.2, 512)])
    two = work.totals([work.row_at(0.1, 256)] * 2)
    assert one.active == pytest.approx(two.active)
    for batch in (one, two):
        cache.get("flux", plan_totals(batch, {"host": 3000.0}), builder)
    assert builder.calls == 2


def test_dense_rows_beside_are_another_plan() -> None:
    work = flux_work(FLUX_DEV, 128, 128)
    batch = work.totals([work.row_at(0.2, 512)])
    assert plan_totals(batch, {"host": 1.0}) != plan_totals(batch, {"host": 1.0}, batch)


def test_rows_that_take_a_call_each_are_another_plan() -> None:
    work = flux_work(FLUX_DEV, 128, 128)
    batch = work.totals([work.row_at(0.2, 512)])
    assert plan_totals(batch, {}) != plan_totals(replace(batch, alone=1), {})


def test_rows_with_loras_are_another_plan() -> None:
    work = flux_work(FLUX_DEV, 128, 128)
    plain = work.totals([work.row_at(0.2, 512)])
    added = LoraFlops.count([work], plain)
    names = {
        plan_totals(batch, {"host": 1.0}, dense)
        for batch in (plain, replace(plain, added=added))
        for dense in (None, replace(plain, added=added))
    }
    assert len(names) == 4


def test_a_plan_for_one_step_is_another_than_for_steps_that_repeat() -> None:
    cache, builder = PlanCache(), Builder(0.11)
    for lead in (None, 0.0, 1.0, None):
        cache.get("flux", totals(0.11), builder, lead)
    assert builder.calls == 3


def test_the_least_recently_used_goes_first() -> None:
    cache, builder = PlanCache(capacity=2), Builder(0.11)
    for name in ("a", "b", "a", "c", "a"):
        cache.get(name, (1.0,), builder)
    assert builder.calls == 3
    cache.get("b", (1.0,), builder)
    assert builder.calls == 4
    assert len(cache) == 2


def test_zero_totals_have_a_bucket_of_their_own() -> None:
    cache, builder = PlanCache(), Builder(0.11)
    cache.get("flux", (0.0,), builder)
    cache.get("flux", (1.0,), builder)
    assert builder.calls == 2


def test_a_shared_plan_is_nearly_as_good_as_ones_own() -> None:
    # The two ends of one bucket are at most 2^(1/16) apart in active tokens.
    for mask in (0.06, 0.11, 0.19, 0.3):
        other = mask * 2 ** (1 / 16)
        shared = plan(flux_costs(25, masks=(mask,), budget_bytes=2e9))
        costs = flux_costs(25, masks=(other,), budget_bytes=2e9)
        best = plan(costs)
        assert evaluate(costs, shared.kinds).latency <= best.latency * 1.03


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="capacity"):
        PlanCache(capacity=0)
