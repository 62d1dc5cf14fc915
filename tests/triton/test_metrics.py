"""Metrics follow the status record and take every observation; counters never go back."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_benchmarks.published_models import FLUX_DEV
from maskserve_common.config import Config
from maskserve_common.config_file import config_of
from maskserve_common.contracts.keys import Anchor
from maskserve_common.contracts.status_record import AdapterStatus, AdapterTierTotal
from maskserve_common.observations import Observations
from maskserve_engine.adapters.control_net_loader import CONTROL_NETS
from maskserve_engine.adapters.lora_loader import LORAS
from maskserve_engine.families.flux.spec import flux_work
from maskserve_engine.start.assembly import assemble
from maskserve_triton.metric_table import (
    ADAPTER_SERIES,
    ENDS,
    ENGINE_METRICS,
    FRONT_METRICS,
    PREFIX,
    outcome_of,
)
from maskserve_triton.metrics import EngineMetrics, FrontMetrics, MetricsThread
from tests.fakes.model_specs import FILL_SPEC
from tests.fakes.pb_utils import FakeTriton, Metric
from tests.fakes.status import READY
from tests.support.eventually import eventually

# What the record has for readers of its own, and the page has in another form.
UNPUBLISHED = {
    "step_seconds_total",  # a histogram's sum
    "step_load_stall_seconds_total",
    "step_tokens_total",
    "cache_hits_total",  # by tier
    "cache_evictions_total",
}


@pytest.fixture
def observations() -> Observations:
    return Observations()


@pytest.fixture
def metrics(api: FakeTriton, config: Config, observations: Observations) -> EngineMetrics:
    return EngineMetrics(api, "worker-3", observations, config.runtime_dir)


def one(api: FakeTriton, name: str, **labels: str) -> Metric:
    metrics = [m for m in api.metrics[PREFIX + name] if labels.items() <= m.labels.items()]
    assert len(metrics) == 1, (name, labels, metrics)
    return metrics[0]


def test_metrics_follow_the_record(api: FakeTriton, metrics: EngineMetrics) -> None:
    metrics.update(replace(READY, counters={"steps_total": 2}, tier_bytes={"device": 10}))
    metrics.update(
        replace(
            READY,
            counters={
                "steps_total": 5,
                "cache_hits_total": 3,
                "cache_hits_total.device": 2,
                "cache_hits_total.host": 1,
                "step_seconds_total": 9.0,
                "unheard_of_total": 1,
            },
            tier_bytes={"device": 7},
            adapter_tiers={"device": AdapterTierTotal(3, 50)},
            controlnets=(
                AdapterStatus("outline", "device", 70),
                AdapterStatus("depth", "coming", 30),
            ),
            templates={"device": ("a", "b")},
        )
    )
    assert one(api, "steps_total").value == 5
    assert one(api, "steps_total").labels == {"worker": "worker-3"}
    assert one(api, "cache_bytes", tier="device").value == 7
    assert one(api, "cache_templates", tier="device").value == 2
    assert one(api, "cache_hits_total", tier="device").value == 2
    assert one(api, "cache_hits_total", tier="host").value == 1
    assert one(api, "adapters", tier="device").value == 3
    assert one(api, "adapter_bytes", tier="device").value == 50
    assert one(api, "controlnets").value == 1
    assert one(api, "controlnet_bytes").value == 70
    assert one(api, "running_rows").value == 0
    assert one(api, "row_capacity").value == 8


def test_a_record_that_starts_anew_takes_nothing_back(
    api: FakeTriton, metrics: EngineMetrics
) -> None:
    for total in (5, 1, 6):
        metrics.update(replace(READY, counters={"steps_total": total}))
    assert one(api, "steps_total").value == 6


def test_everything_is_there_from_the_start(api: FakeTriton, metrics: EngineMetrics) -> None:
    assert set(api.metrics) == {PREFIX + name for name in ENGINE_METRICS}
    for name, spec in ENGINE_METRICS.items():
        labelled = sum(series == name for series, _ in ADAPTER_SERIES) + bool(spec.first)
        assert len(api.metrics[PREFIX + name]) == (labelled if spec.labels else 1)


@pytest.mark.usefixtures("beat")
def test_each_observation_is_entered_once(
    api: FakeTriton, metrics: EngineMetrics, observations: Observations
) -> None:
    for seconds in (0.5, 0.25):
        observations.add("step_seconds", seconds)
    observations.dropped = 4
    metrics.publish()
    metrics.publish()
    assert one(api, "step_seconds").observed == [0.5, 0.25]
    assert one(api, "observations_dropped_total").value == 4
    assert one(api, "steps_total").value == 10
    assert 0 <= one(api, "engine_silence_seconds").value < 5


def test_a_first_value_is_counted_where_there_was_a_zero_before(
    api: FakeTriton, metrics: EngineMetrics, observations: Observations
) -> None:
    """Nobody knows these labels before they come."""
    for template, drift in (("a", 0.1), ("a", 0.2), ("b", 0.3), ("a", 0.4), ("other", 0.5)):
        observations.add("cache_drift", drift, template)
    metrics.publish()
    observed_by_template = {
        m.labels["template"]: m.observed for m in api.metrics[PREFIX + "cache_drift"]
    }
    assert observed_by_template == {"other": [0.1, 0.3, 0.5], "a": [0.2, 0.4], "b": []}


def test_fronts_share_their_metrics(api: FakeTriton) -> None:
    unary, streaming = Observations(), Observations()
    fronts = [
        FrontMetrics(api, "w", "edit", unary),
        FrontMetrics(api, "w", "edit_stream", streaming),
    ]
    assert len(api.metrics["maskserve_edit_ends_total"]) == 2 * len(ENDS)
    unary.add("edit_ends_total", 1.0, "edit", "refused", "INVALID_REQUEST")
    streaming.add("edit_seconds", 1.5, "edit_stream")
    streaming.add("edit_kinds_total", 1.0, "edit_stream", "generate")
    for front in fronts:
        front.publish()
    assert one(api, "edit_ends_total", model="edit", code="INVALID_REQUEST").value == 1
    assert one(api, "edit_ends_total", model="edit_stream", code="INVALID_REQUEST").value == 0
    assert one(api, "edit_seconds", model="edit_stream").observed == [1.5]
    assert one(api, "edit_kinds_total", model="edit_stream", kind="generate").value == 1
    assert one(api, "edit_kinds_total", model="edit", kind="generate").value == 0


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("OK", "done"),
        ("CANCELLED", "cancelled"),
        ("DEADLINE_EXCEEDED", "deadline"),
        ("ENGINE_FAILED", "failed"),
        ("INVALID_REQUEST", "refused"),
        ("TEMPLATE_NOT_FOUND", "refused"),
        ("ADAPTER_NOT_FOUND", "refused"),
        ("OVERLOADED", "refused"),
    ],
)
def test_outcomes(code: str, outcome: str) -> None:
    assert outcome_of(code) == outcome
    assert (outcome, code) in ENDS


def engine_counters() -> set[str]:
    """Names of what an engine counts, those of its cache included."""
    adapter: Any = SimpleNamespace(
        spec=FILL_SPEC,
        anchors=lambda tokens, steps, stride: (Anchor(0.5, 500.0),),
        work=lambda height, width: flux_work(FLUX_DEV, height, width),
        blocks=57,
        weight_bytes=0,
        entry_halves=1,
    )
    config = config_of({"model": {"path": str(DEMO_MODEL)}})
    engine = assemble(config, adapter, prompt=lambda: None)
    audits = engine.manager.audits.counters()
    more = {*LORAS.counters(), *CONTROL_NETS.counters()}
    return {*engine.counters, *engine.cache.counters(), *audits, *more}


def test_every_counter_is_published_or_known_not_to_be() -> None:
    counted = {name.partition(".")[0] for name in engine_counters()}
    published = {name for name, spec in ENGINE_METRICS.items() if spec.kind == "COUNTER"}
    assert counted - published <= UNPUBLISHED
    assert published - counted == {"observations_dropped_total"}


def test_every_metric_says_what_it_counts() -> None:
    """Its HELP on the page of metrics is the only place that does."""
    for name, spec in {**ENGINE_METRICS, **FRONT_METRICS}.items():
        assert re.fullmatch(r"[A-Z].{10,}\.", spec.description), name


def test_a_metrics_name_says_its_kind_as_documented() -> None:
    """docs/operate.md gives the rule, and its one exception."""
    for name, spec in {**ENGINE_METRICS, **FRONT_METRICS}.items():
        histogram = re.search("_(seconds|ratio|error|drift)$", name)
        kind = "COUNTER" if name.endswith("_total") else "HISTOGRAM" if histogram else "GAUGE"
        assert spec.kind == ("GAUGE" if name == "engine_silence_seconds" else kind), name


def test_nothing_is_published_to_a_server_that_is_gone() -> None:
    """Triton's stub would wait for it for good."""

    class Page:
        published = 0

        def publish(self) -> None:
            self.published += 1

    page, server = Page(), [17]
    thread = MetricsThread(page, every_s=0.005, server=lambda: server[0])
    eventually("it is published", lambda: page.published > 2)
    server[0] = 1
    eventually("it has ended", lambda: not thread._thread.is_alive())
    thread.close()
