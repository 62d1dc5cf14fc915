"""The engine's metrics on Triton's own /metrics page, taken from the status record.

A thread beside the engine copies the record's values: setting a metric costs a message to
Triton's process, which has no place in a step.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

from maskserve_core.status import StatusReader, WorkerStatus

log = logging.getLogger("maskserve")

PREFIX = "maskserve_"
_EVERY_S = 0.25


class EngineMetrics:
    """Gauges and counters of one worker."""

    def __init__(self, api: Any, worker: str) -> None:
        self._api = api
        self._labels = {"worker": worker}
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, str], Any] = {}
        self._totals: dict[str, float] = {}

    def update(self, status: WorkerStatus) -> None:
        """Bring every metric to what the record says."""
        self._gauge("running_rows", "Rows in the running batch.", len(status.running))
        self._gauge("waiting_rows", "Edits waiting for a row.", len(status.waiting))
        for tier, size in status.tier_bytes.items():
            self._gauge("cache_bytes", "Bytes of cached activations.", size, tier)
        for name, total in status.counters.items():
            grown = total - self._totals.get(name, 0.0)
            metric = self._metric("COUNTER", name, f"Total of {name.removesuffix('_total')}.")
            if grown > 0:
                metric.increment(grown)
                self._totals[name] = total

    def _gauge(self, name: str, description: str, value: float, tier: str = "") -> None:
        self._metric("GAUGE", name, description, tier).set(value)

    def _metric(self, kind: str, name: str, description: str, tier: str = "") -> Any:
        if name not in self._families:
            family = self._api.MetricFamily
            self._families[name] = family(
                name=PREFIX + name, description=description, kind=getattr(family, kind)
            )
        if (name, tier) not in self._metrics:
            labels = {**self._labels, "tier": tier} if tier else self._labels
            self._metrics[name, tier] = self._families[name].Metric(labels=labels)
        return self._metrics[name, tier]


class MetricsThread:
    """Keeps an EngineMetrics up to date until closed."""

    def __init__(self, metrics: EngineMetrics, runtime_dir: str) -> None:
        self._metrics = metrics
        self._reader = StatusReader(Path(runtime_dir) / "status")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        last = 0
        while not self._closing.wait(_EVERY_S):
            try:
                status = self._reader.read()
                if status is not None and status.sequence != last:
                    last = status.sequence
                    self._metrics.update(status)
            except Exception as error:
                # Serving goes on without metrics.
                log.error("metrics: %s", error, exc_info=error)
                return
