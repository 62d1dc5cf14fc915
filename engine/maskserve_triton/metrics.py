"""A worker's metrics on Triton's own /metrics page.

A thread of its own publishes them, because each value costs a message to Triton's process, which
would delay a step or an answer. Levels and totals of the engine come from its status record, values
of histograms from `Observations`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from maskserve_common.contracts.due_times import SLO_OUTCOMES
from maskserve_common.contracts.request import EDIT_KINDS
from maskserve_common.observations import Observations
from maskserve_common.status import StatusReader, WorkerStatus
from maskserve_triton.metric_table import (
    ADAPTER_SERIES,
    ENDS,
    ENGINE_METRICS,
    FRONT_METRICS,
    PREFIX,
    MetricSpec,
)

log = logging.getLogger("maskserve")

_EVERY_S = 0.25


class MetricPage:
    """The metrics of one process. A metric appears, at zero, when it is first labels_by_name."""

    def __init__(self, api: Any, worker: str, table: Mapping[str, MetricSpec]) -> None:
        self._api, self._worker, self._table = api, worker, table
        self._families = {name: self._family(name, spec) for name, spec in table.items()}
        self._metrics: dict[tuple[str, ...], Any] = {}
        self._published: dict[tuple[str, ...], float] = {}
        for name, spec in table.items():
            if not spec.labels:
                self.metric(name)
            elif spec.first:
                self.metric(name, spec.first)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge to `value`."""
        metric, key = self.metric(name, *labels), (name, *labels)
        if self._published.get(key) != value:
            metric.set(value)
            self._published[key] = value

    def total(self, name: str, total: float, *labels: str) -> None:
        """Raise a counter to `total`; it never decreases."""
        metric, key = self.metric(name, *labels), (name, *labels)
        increase = total - self._published.get(key, 0.0)
        if increase > 0:
            metric.increment(increase)
            self._published[key] = total

    def take(self, observations: Observations) -> None:
        """Enter observations into histograms and counters."""
        for name, value, labels in observations.take():
            first = self._table[name].first
            exists = (name, *labels) in self._metrics
            metric = self.metric(name, *labels)
            if first and not exists:
                metric = self.metric(name, first)
            if self._table[name].kind == "HISTOGRAM":
                metric.observe(value)
            else:
                metric.increment(value)

    def metric(self, name: str, *labels: str) -> Any:
        """Return the metric of a family with these labels."""
        key = (name, *labels)
        if key not in self._metrics:
            spec = self._table[name]
            labels_by_name = dict(zip(spec.labels, labels, strict=True))
            options = {"buckets": list(spec.buckets)} if spec.buckets else {}
            family = self._families[name]
            self._metrics[key] = family.Metric(
                labels={"worker": self._worker, **labels_by_name}, **options
            )
        return self._metrics[key]

    def _family(self, name: str, spec: MetricSpec) -> Any:
        kind = getattr(self._api.MetricFamily, spec.kind)
        return self._api.MetricFamily(name=PREFIX + name, description=spec.description, kind=kind)


class EngineMetrics:
    """Metrics of the denoiser's process."""

    def __init__(self, api: Any, worker: str, observations: Observations, runtime_dir: str) -> None:
        self._page = MetricPage(api, worker, ENGINE_METRICS)
        # A rate sees the first load only if there was a zero before it.
        for name, label in ADAPTER_SERIES:
            self._page.metric(name, label)
        self._observations = observations
        self._reader = StatusReader(Path(runtime_dir) / "status")
        self._sequence = 0

    def publish(self) -> None:
        """Update every metric."""
        self._page.take(self._observations)
        self._page.total("observations_dropped_total", self._observations.dropped)
        status = self._reader.read()
        if status is None:
            return
        self._page.set("engine_silence_seconds", round(status.age_s(), 2))
        if status.sequence != self._sequence:
            self._sequence = status.sequence
            self.update(status)

    def update(self, status: WorkerStatus) -> None:
        """Set levels and totals from the record."""
        self._page.metric("refresh_error", status.model)  # so that a rate sees the first edit
        self._page.set("running_rows", len(status.running))
        self._page.set("waiting_rows", len(status.waiting))
        self._page.set("row_capacity", status.max_rows)
        for tier, size in status.tier_bytes.items():
            self._page.set("cache_bytes", size, tier)
        for tier, template_ids in status.templates.items():
            self._page.set("cache_templates", len(template_ids), tier)
        for tier, tier_total in status.adapter_tiers.items():
            self._page.set("adapter_bytes", tier_total.nbytes, tier)
            self._page.set("adapters", tier_total.count, tier)
        nets = [net.nbytes for net in status.controlnets if net.tier == "device"]
        self._page.set("controlnets", len(nets))
        self._page.set("controlnet_bytes", sum(nets))
        for key, total in status.counters.items():
            # A counter with a label has a key NAME.LABEL for each value of the label.
            name, _, label = key.partition(".")
            labels = (label,) if label else ()
            if name in ENGINE_METRICS and len(ENGINE_METRICS[name].labels) == len(labels):
                self._page.total(name, total, *labels)


class FrontMetrics:
    """Metrics of a front's process."""

    def __init__(self, api: Any, worker: str, model: str, observations: Observations) -> None:
        self._page = MetricPage(api, worker, FRONT_METRICS)
        self._observations = observations
        # A rate sees the first of its kind only if there was a zero before it.
        for outcome, code in ENDS:
            self._page.metric("edit_ends_total", model, outcome, code)
        for kind in EDIT_KINDS:
            self._page.metric("edit_kinds_total", model, kind)
        for outcome in SLO_OUTCOMES:
            self._page.metric("slo_total", model, outcome)
        for name in ("edit_seconds", "slack_seconds"):
            self._page.metric(name, model)

    def publish(self) -> None:
        """Update every metric."""
        self._page.take(self._observations)


class MetricsPublisher(Protocol):
    """Metrics that a MetricsThread publishes."""

    def publish(self) -> None: ...


class MetricsThread:
    """Publishes metrics until it is closed or its server has ended.

    Args:
        metrics: metrics to publish.
        every_s: seconds between two publications.
        server: returns the server's process id.
    """

    def __init__(
        self,
        metrics: MetricsPublisher,
        every_s: float = _EVERY_S,
        server: Callable[[], int] = os.getppid,
    ) -> None:
        self._metrics, self._every_s, self._server = metrics, every_s, server
        self._server_pid = server()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._every_s):
            # TRITON-2.51: for a killed server the stub waits for ever and holds Python's lock: this
            # process could not even end itself.
            if self._server() != self._server_pid:
                return
            try:
                self._metrics.publish()
            except Exception as error:
                # The worker serves without metrics.
                log.error("metrics: %s", error, exc_info=error)
                return
