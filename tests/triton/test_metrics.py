"""Metrics follow the status record; counters never go back."""

from __future__ import annotations

from dataclasses import replace

from maskserve_core.backend.metrics import EngineMetrics
from tests.fakes.pb_utils import FakeTriton
from tests.triton.conftest import READY


def test_metrics_follow_the_record(api: FakeTriton) -> None:
    metrics = EngineMetrics(api, "worker-3")
    metrics.update(replace(READY, counters={"steps_total": 2}, tier_bytes={"device": 10}))
    metrics.update(replace(READY, counters={"steps_total": 5}, tier_bytes={"device": 7}))
    [steps] = api.metrics["maskserve_steps_total"]
    assert steps.value == 5
    assert steps.labels == {"worker": "worker-3"}
    [tier] = api.metrics["maskserve_cache_bytes"]
    assert (tier.value, tier.labels["tier"]) == (7, "device")
    assert api.metrics["maskserve_running_rows"][0].value == 0
