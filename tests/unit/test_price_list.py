"""What a worker publishes of its prices: an estimate first, then what its own steps took."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from maskserve_core.contracts.facts import load_facts
from maskserve_core.contracts.pricing import Pricing
from maskserve_core.contracts.status_record import RowStatus
from maskserve_engine.price_list import PriceList
from tests.fakes.jobs import config_of

TOKENS = 16


@pytest.fixture
def prices(tiny_fill: Path) -> PriceList:
    return PriceList(config_of(tiny_fill), load_facts(tiny_fill))


def rows(rng: random.Random, total: int) -> list[RowStatus]:
    made = []
    for i in range(rng.randint(1, 8)):
        kind = rng.choice(("dense", "cached"))
        active = total if kind == "dense" else rng.randint(1, total // 2)
        made.append(RowStatus(str(i), kind, active, total, 9))  # type: ignore[arg-type]
    return made


def step_of(pricing: Pricing, batch: list[RowStatus]) -> float:
    return pricing.step + sum(
        pricing.row(row.active_tokens, row.total_tokens, cached=row.kind == "cached")[0]
        for row in batch
    )


def test_prices_follow_the_steps_that_were_measured(prices: PriceList):
    """A device three times as slow per FLOP as estimated, with another fixed part."""
    estimated = prices.pricing
    total = int(estimated.tokens)
    true = replace(estimated.with_compute(0.02, 3.0), fetch={})
    rng = random.Random(7)
    for _ in range(64):
        batch = rows(rng, total)
        prices.measured(batch, step_of(true, batch) * rng.uniform(0.97, 1.03))
    probe = rows(rng, total)
    assert step_of(prices.pricing, probe) == pytest.approx(step_of(true, probe), rel=0.05)
    # The naive rival, the estimate as it was, is far off.
    assert step_of(estimated, probe) < 0.5 * step_of(true, probe)
    assert prices.pricing.spare_token == estimated.spare_token


def test_equal_steps_scale_the_line_and_leave_its_slope(prices: PriceList):
    estimated = prices.pricing
    total = int(estimated.tokens)
    batch = [RowStatus("a", "dense", total, total, 9)]
    for _ in range(32):
        prices.measured(batch, 5 * step_of(estimated, batch))
    assert step_of(prices.pricing, batch) == pytest.approx(5 * step_of(estimated, batch))
    assert prices.pricing.dense_row == pytest.approx(5 * estimated.dense_row)
