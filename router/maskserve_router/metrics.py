"""The router's Prometheus metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from maskserve_common.contracts.due_times import OK, SLO_OUTCOMES, slo_outcome
from maskserve_common.errors import CODES
from maskserve_router.messages.job_states import ENDS as JOB_ENDS
from maskserve_router.workers.predictions import Predictions
from maskserve_router.workers.worker import SentEdit

_ROUTE = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 5e-3, 2e-2)
_EDIT = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
_RELATIVE = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
_ERROR = (-30.0, -10.0, -3.0, -1.0, -0.3, -0.1, 0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


ROUTES = ("http", "grpc", "openai")
RETRIES = ("refused", "worker", "unknown")
"""Blame of failures after which another worker is tried."""
REJECTIONS = (
    "edits",
    "bytes",
    "operations",
    "key",
    "stopping",
    "deadline",
    "silent",
    "connections",
    "calls",
)
WEBHOOK_ENDS = ("taken", "given_up")


class Metrics:
    """All metrics of one router, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"maskserve_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"maskserve_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"maskserve_{name}", text, buckets=buckets, registry=self.registry)

        self.requests = counter(
            "requests_total", "Answered edits, by route and error code.", "route", "code"
        )
        self.retries = counter(
            "retries_total", "Edits sent to another worker, by reason.", "reason"
        )
        self.ejections = counter("ejections_total", "Ejections of a worker.", "worker")
        self.rejections = counter(
            "admission_rejections_total",
            "Edits, operations and connections that the router refused, by reason.",
            "reason",
        )
        self.inflight = gauge(
            "inflight", "Unanswered edits that this router sent to a worker.", "worker"
        )
        self.worker_up = gauge("worker_up", "Whether a worker takes edits.", "worker")
        self.waiting = gauge("router_waiting", "Edits that wait in the router for a worker.")
        self.edits = gauge("router_edits", "Accepted edits without an answer yet.")
        self.bytes = gauge("router_bytes", "Bytes of requests and answers in memory.")
        self.jobs = counter("jobs_total", "Jobs that have ended, by state.", "state")
        self.jobs_waiting = gauge("router_jobs_waiting", "Jobs that no router has started.")
        self.jobs_running = gauge("router_jobs_running", "Jobs that this router runs.")
        self.webhooks = counter(
            "webhooks_total", "Webhooks that were delivered or given up.", "end"
        )
        self.nodes_busy = gauge(
            "node_servers_busy",
            "Node servers that recent calls of a model kept busy, over all routers.",
            "model",
        )
        self.route_seconds = histogram("route_seconds", "Seconds of one routing decision.", _ROUTE)
        self.edit_seconds = histogram(
            "routed_edit_seconds", "Seconds that an edit took at its worker.", _EDIT
        )
        self.predicted = histogram(
            "predicted_vs_actual_seconds",
            "Actual minus predicted seconds of an edit at its worker.",
            _ERROR,
        )
        self.prediction_error = histogram(
            "prediction_relative_error",
            "|predicted - actual| / actual seconds of an edit at its worker.",
            _RELATIVE,
        )
        self.slo = counter("router_slo_total", "Edits with a due time, by outcome.", "outcome")
        for outcome in SLO_OUTCOMES:
            self.slo.labels(outcome)
        self.slack = histogram(
            "router_slack_seconds",
            "Seconds left until the due time when an edit was answered; negative if it was late.",
            _ERROR,
        )
        self._begin_at_zero()
        self.predictions = Predictions()

    def _begin_at_zero(self) -> None:
        """Create all label values at zero: a rate needs a zero before the first event."""
        for route in ROUTES:
            for code in (OK, *CODES):
                self.requests.labels(route, code)
        for reason in RETRIES:
            self.retries.labels(reason)
        for reason in REJECTIONS:
            self.rejections.labels(reason)
        for state in JOB_ENDS:
            self.jobs.labels(state)
        for end in WEBHOOK_ENDS:
            self.webhooks.labels(end)

    def record_answer(self, sent: SentEdit, seconds: float) -> None:
        """Count a worker's answer to an edit."""
        self.edit_seconds.observe(seconds)
        self.predicted.observe(seconds - sent.predicted.answered_s)
        self.prediction_error.observe(self.predictions.add(sent.predicted.answered_s, seconds))

    def due(self, code: str, slack_s: float) -> None:
        """Count the end of an edit with a due time.

        Args:
            code: `OK` or the error's code.
            slack_s: seconds that were left until it was due.
        """
        outcome = slo_outcome(code, slack_s)
        if outcome is not None:
            self.slo.labels(outcome).inc()
        if code == OK:
            self.slack.observe(slack_s)

    def page(self) -> bytes:
        """Return the page for Prometheus."""
        text: bytes = generate_latest(self.registry)
        return text
