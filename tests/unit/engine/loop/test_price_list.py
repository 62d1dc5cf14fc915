"""A worker's published prices: first an estimate, then the times of its own steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from maskserve_common.config import Config
from maskserve_common.contracts.pricing import DegreePrice
from maskserve_common.line_fit import Line
from maskserve_engine.families.registry import load_adapter
from maskserve_engine.fitting.entry_store import entry_format, estimated_costs
from maskserve_engine.gangs.degree_times import DegreeTimes
from maskserve_engine.loop.measured_costs import MeasuredCosts, PriceList
from maskserve_engine.planning.degree_costs import ExchangeCosts, seconds_by_degree
from maskserve_engine.planning.flops import RowTokens
from maskserve_engine.spec.estimate import pricing_of
from tests.fakes.jobs import config_of


@pytest.fixture(params=["flux", "sdxl-base"])
def config(request: pytest.FixtureRequest, tiny_fill: Path, tiny_unets: dict[str, Path]) -> Config:
    return config_of(tiny_fill if request.param == "flux" else tiny_unets["sdxl-base"])


def test_a_worker_whose_edits_have_several_devices_says_what_these_gain(config: Config) -> None:
    engine = structs.replace(config.engine, devices=4, policy="deadline")
    config = structs.replace(config, engine=engine)
    adapter, costs = load_adapter(config), MeasuredCosts(estimated_costs(config))
    exchange = ExchangeCosts(1e12, 1e-9, 4)
    times = DegreeTimes(adapter, costs, lambda: exchange, 4)
    prices = PriceList(config, adapter, costs, 4, times.prices)
    degrees = prices.pricing.degrees
    if adapter.spec.guidance == "cfg":
        assert degrees == (DegreePrice(0.5, 0.5),)
        return
    side = adapter.spec.native_resolution // adapter.spec.vae_scale_factor
    text, work = (
        adapter.spec.text_tokens(config.model.max_sequence_length),
        adapter.work(side, side),
    )
    line = costs.model.compute
    for kind, ratio in (("dense", 1.0), ("kv", 0.2)):
        row = work.row_at(ratio, text)
        alone, *several = seconds_by_degree(work, row, kind, line, exchange, (1, 2, 4))
        gains = [getattr(degree, "dense" if kind == "dense" else "cached") for degree in degrees]
        expected = [min(1.0, (degree - line.fixed) / (alone - line.fixed)) for degree in several]
        assert gains == pytest.approx(expected)
    flat = replace(costs.model, compute=Line(0.1, 0.0))  # of steps that all take as long
    costs.model, costs.sequence = flat, costs.sequence + 1
    assert prices.pricing.degrees == (DegreePrice(1.0, 1.0),) * 2
    spread = structs.replace(config, engine=structs.replace(engine, policy="spread"))
    assert PriceList(spread, adapter, costs, 4).pricing.degrees == ()


def test_prices_follow_what_the_worker_has_measured(config: Config) -> None:
    """A device three times as slow per FLOP as estimated, with another fixed part."""
    adapter, costs = load_adapter(config), MeasuredCosts(estimated_costs(config))
    prices = PriceList(config, adapter, costs, anchors=4)
    side = adapter.spec.native_resolution // adapter.spec.vae_scale_factor
    work, text = (
        adapter.work(side, side),
        float(adapter.spec.text_tokens(config.model.max_sequence_length)),
    )
    estimated = prices.pricing
    assert prices.pricing is estimated  # nothing was measured
    slow = Line(0.02, 3 * costs.model.compute.per_unit)
    flops = [work.step_flops([work.row_at(m, text)], "kv") for m in (0.1, 0.5, 0.9)]
    for n in range(64):
        costs.step(flops[n % 3], slow.seconds(flops[n % 3]))
    whole = RowTokens(tuple(float(n) for n in work.tokens), text)
    dense = slow.seconds(work.step_flops([whole], "dense"))
    priced = prices.pricing
    assert priced.step + priced.dense(work.tokens[0]) == pytest.approx(dense, rel=1e-6)
    # The naive rival, the estimate as it was, is far off.
    assert estimated.step + estimated.dense(work.tokens[0]) < 0.5 * dense
    assert priced.spare_token == estimated.spare_token
    expected = pricing_of(
        work,
        replace(costs.model, compute=slow),
        entry_format(config),
        text=text,
        anchors=4,
        steps_per_anchor=config.model.num_inference_steps / 4,
    )
    assert priced.active_token == pytest.approx(expected.active_token)
    assert priced.fetch == expected.fetch
