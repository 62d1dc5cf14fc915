"""Pricing from counted work: what routing believes against what the model computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from maskserve_benchmarks.published_models import SD21, SDXL
from maskserve_common.line_fit import Line
from maskserve_common.routing import Pricing
from maskserve_engine.families.flux.spec import flux_work
from maskserve_engine.families.unet.spec import unet_work
from maskserve_engine.planning.cost_model import CostModel
from maskserve_engine.planning.entry_bytes import FORMATS, block_bytes, entry_bytes
from maskserve_engine.planning.flops import RowTokens
from maskserve_engine.spec.estimate import pricing_of
from maskserve_engine.spec.model_spec import TextShares

CONFIG = {
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "in_channels": 64,
    "num_layers": 2,
    "num_single_layers": 4,
    "pooled_projection_dim": 64,
    "joint_attention_dim": 128,
}
WORK = flux_work(CONFIG, 32, 32)
TEXT = 24
COSTS = CostModel(
    "some",
    Line(0.003, 2e-12),
    {"device": Line(0.0, 0.0), "host": Line(1e-5, 1e-9), "disk": Line(1e-4, 5e-9)},
)


@pytest.fixture
def pricing() -> Pricing:
    return pricing_of(WORK, COSTS, FORMATS["bfloat16"], text=TEXT, anchors=5, steps_per_anchor=2)


@pytest.mark.parametrize("active", [1, 100, 200])
def test_a_batch_costs_the_sum_of_its_rows(pricing: Pricing, active: int):
    rows = [RowTokens((float(active),), TEXT), RowTokens((50.0,), TEXT)]
    counted = COSTS.step_seconds(WORK.step_flops(rows, "kv"))
    priced = pricing.step + sum(
        pricing.row(row.active[0], WORK.tokens[0], cached=True)[0] for row in rows
    )
    assert priced == pytest.approx(counted)


def test_dense_rows_loads_and_fetches(pricing: Pricing):
    full = RowTokens((256.0,), TEXT)
    dense = COSTS.step_seconds(WORK.step_flops([full], "dense"))
    assert pricing.step + pricing.dense_row == pytest.approx(dense)
    loaded = block_bytes(WORK, [(206.0,)], FORMATS["bfloat16"])[:, 1].sum()
    load = pricing.spare_token * 206
    assert load == pytest.approx(loaded * 1e-9 / 2)  # two steps share an anchor
    template = 5 * entry_bytes(WORK, "kv", FORMATS["bfloat16"])
    assert pricing.fetch == {"disk": pytest.approx(COSTS.load_seconds("disk", template))}
    assert pricing.fetch_s("host") == pricing.fetch_s("device") == 0.0


@pytest.mark.parametrize("active", [0.05, 0.4])
def test_text_that_steps_leave_out_is_what_is_counted(pricing: Pricing, active: float) -> None:
    shares, total = TextShares(0.25, 0.0), float(WORK.tokens[0])
    left_out = pricing_of(
        WORK, COSTS, FORMATS["bfloat16"], text=TEXT, anchors=5, steps_per_anchor=2,
        text_shares=shares,
    )  # fmt: skip
    row = WORK.row_at(active, TEXT)
    between = replace(row, text=0.0, text_read=TEXT)
    with_text, without = (
        WORK.step_flops([work_row], "kv") * COSTS.compute.per_unit for work_row in (row, between)
    )
    row_cost, _ = left_out.row(active * total, total, cached=True)
    assert row_cost == pytest.approx(0.25 * with_text + 0.75 * without)
    dense = WORK.step_flops([WORK.row_at(1.0, TEXT)], "dense") * COSTS.compute.per_unit
    refresh_cost = left_out.refreshing_row(active * total, total, 0.1, 0.05)
    assert refresh_cost == pytest.approx(0.1 * dense + 0.95 * without)
    computed, _ = pricing.row(active * total, total, cached=True)
    assert pricing.refreshing_row(active * total, total, 0.1, 0.05) == pytest.approx(
        0.1 * dense + 0.95 * computed
    )


@pytest.mark.parametrize("config", [SD21, SDXL])
def test_a_row_with_a_tile_costs_about_what_is_counted(config: dict[str, Any]) -> None:
    """A line from an empty mask to a full one, the naive rival, is a third too low."""
    side = int(config["sample_size"])
    work = unet_work(config, side, side, guidance=False, halo=4)
    priced = pricing_of(work, COSTS, FORMATS["int4"], text=77, anchors=4)
    for ratio in (0.05, 0.1, 0.2, 0.35, 0.5):
        counted = work.step_flops([work.row_at(ratio, 77)], "kv") * COSTS.compute.per_unit
        row_cost, _ = priced.row(ratio * work.tokens[0], work.tokens[0], cached=True)
        assert row_cost == pytest.approx(counted, rel=0.07)
