"""Every metric that a worker adds to Triton's own /metrics page (docs/operate.md#metrics)."""

from __future__ import annotations

from dataclasses import dataclass

from maskserve_common.contracts.due_times import OK
from maskserve_common.errors import CODES, Cancelled, DeadlineExceeded, EngineFailed

PREFIX = "maskserve_"
_OUTCOMES = {
    OK: "done",
    Cancelled.code: "cancelled",
    DeadlineExceeded.code: "deadline",
    EngineFailed.code: "failed",
}


def outcome_of(code: str) -> str:
    """`done`, `cancelled`, `deadline` or `failed`; every other code is a refusal."""
    return _OUTCOMES.get(code, "refused")


ENDS = tuple((outcome_of(code), code) for code in (OK, *CODES))
"""Outcome and code of every end of an edit."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """A metric. Every metric has the label `worker` before its own."""

    kind: str
    """`GAUGE`, `COUNTER` or `HISTOGRAM`."""
    description: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, without the last one, infinity."""
    first: str = ""
    """Label under which the first value of any other is counted, where labels are not known before
    they come: a rate sees a series from its second value on, and this one from the start."""


def _gauge(description: str, *labels: str) -> MetricSpec:
    return MetricSpec("GAUGE", description, labels)


def _counter(description: str, *labels: str) -> MetricSpec:
    return MetricSpec("COUNTER", description, labels)


def _histogram(
    description: str, buckets: tuple[float, ...], *labels: str, first: str = ""
) -> MetricSpec:
    return MetricSpec("HISTOGRAM", description, labels, buckets, first)


_SLACK = (-30.0, -10.0, -3.0, -1.0, -0.3, -0.1, 0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_STEP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_STALL = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_WAIT = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_EDIT = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
_SHARE = (0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_RATIO = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_ERROR = (0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
_DRIFT = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 0.75, 1.0)

ENGINE_METRICS = {
    "running_rows": _gauge("Rows in the running batch, including rows that prime templates."),
    "waiting_rows": _gauge("Edits, and templates to be primed, that wait for a row."),
    "row_capacity": _gauge("Rows that the running batch can hold."),
    "engine_silence_seconds": _gauge("Seconds since the engine last wrote its status record."),
    "cache_bytes": _gauge("Bytes of cached activations.", "tier"),
    "cache_templates": _gauge("Templates whose activations are complete in the tier.", "tier"),
    "adapter_bytes": _gauge("Bytes of loaded LoRAs.", "tier"),
    "adapters": _gauge("Loaded LoRAs.", "tier"),
    "adapter_load_failures_total": _counter("LoRAs that failed to load onto the device."),
    "adapter_evictions_total": _counter("LoRAs evicted from the device to make room."),
    "controlnets": _gauge("ControlNets on the device."),
    "controlnet_bytes": _gauge("Bytes of ControlNets on the device."),
    "controlnet_load_failures_total": _counter("ControlNets that failed to load onto the device."),
    "controlnet_evictions_total": _counter(
        "ControlNets evicted from the device to make room, or lost with their service."
    ),
    "steps_total": _counter("Steps of the batch; each is one call of the model."),
    "edits_total": _counter("Edits that ran their last step."),
    "active_tokens_total": _counter("Tokens computed for edits, summed over rows and steps."),
    "dense_rows_total": _counter("Rows that computed all tokens, summed over steps."),
    "cached_rows_total": _counter("Rows that used cached activations, summed over steps."),
    "priming_rows_total": _counter("Rows that primed a template, summed over steps."),
    "skipped_rows_total": _counter(
        "Steps of done edits in which the model did not run (step_interval)."
    ),
    "primings_total": _counter(
        "Templates whose priming ended, done or given up for lack of room.", "outcome"
    ),
    "cache_hits_total": _counter("Edits that found their template's activations.", "tier"),
    "cache_own_total": _counter("Edits that ran with refresh steps."),
    "cache_misses_total": _counter("Edits that needed cached activations and found none."),
    "cache_evictions_total": _counter("Templates whose activations were evicted.", "tier"),
    "cache_corrupt_total": _counter(
        "Entries dropped because they were truncated or had a wrong checksum.", "tier"
    ),
    "cache_failures_total": _counter(
        "Reads and writes that failed on the storage of a tier.", "tier"
    ),
    "cache_loaded_bytes_total": _counter("Bytes of entries loaded for rows.", "tier"),
    "cache_integrity_failures_total": _counter(
        "Checks of an idle worker's cache that found unreleased entries or wrong byte counts."
    ),
    "plans_total": _counter("Steps with cached rows, by how their plan was chosen.", "choice"),
    "plan_blocks_total": _counter(
        "Blocks that cached rows ran, by kind, summed over steps.", "kind"
    ),
    "audits_total": _counter("Cached edits that were repeated without the cache and compared."),
    "cache_distrusts_total": _counter(
        "Templates that run dense because one of their cached edits drifted."
    ),
    "observations_dropped_total": _counter(
        "Values missing from histograms because their queue was full."
    ),
    "step_seconds": _histogram("Seconds of one step of the batch, without loading.", _STEP),
    "step_load_stall_seconds": _histogram(
        "Seconds that a step waited for cached activations, in steps that read some.", _STALL
    ),
    "adapter_load_seconds": _histogram(
        "Seconds to load a LoRA onto the device, by its source.", _EDIT, "source"
    ),
    "adapter_wait_seconds": _histogram(
        "Seconds that an edit waited for its LoRAs, of edits that waited.", _WAIT
    ),
    "controlnet_stale_steps_total": _counter(
        "Steps of edits that used a ControlNet service's residuals requested one step ahead."
    ),
    "controlnet_load_seconds": _histogram("Seconds to load a ControlNet onto the device.", _EDIT),
    "controlnet_wait_seconds": _histogram(
        "Seconds that an edit waited for its ControlNets, of edits that waited.", _WAIT
    ),
    "controlnet_stall_seconds": _histogram(
        "Seconds of one wait of a step for the ControlNet service.", _STALL
    ),
    "cache_drift": _histogram(
        "Relative difference between cached and dense latents inside the mask, for audited edits. "
        "The first templates have their own histograms.",
        _DRIFT,
        "template",
        first="other",
    ),
    "refresh_error": _histogram(
        "Mean relative error of an edit's lookaheads at its refresh steps, of edits that had some.",
        _ERROR,
        "model",
    ),
    "step_prediction_error": _histogram(
        "Error of a plan's predicted step time, as a share of the step time.", _SHARE
    ),
    "mask_ratio": _histogram("Computed tokens over all tokens, of finished edits.", _RATIO),
    "queue_seconds": _histogram("Seconds that an edit waited in the engine for a row.", _WAIT),
}
ADAPTER_SERIES = (
    *((name, tier) for name in ("adapters", "adapter_bytes") for tier in ("device", "host")),
    *(("adapter_load_seconds", source) for source in ("host", "storage")),
)
"""Metrics and labels that exist from the start, also in workers without adapters."""
FRONT_METRICS = {
    "edit_ends_total": _counter(
        "Answered edits, by outcome and error code.", "model", "outcome", "code"
    ),
    "edit_seconds": _histogram(
        "Seconds from the acceptance of an edit to its picture.", _EDIT, "model"
    ),
    "edit_kinds_total": _counter("Edits answered with a picture, by kind.", "model", "kind"),
    "slo_total": _counter("Edits with a due time, by outcome.", "model", "outcome"),
    "slack_seconds": _histogram(
        "Seconds left until the due time when an edit was answered; negative if it was late.",
        _SLACK,
        "model",
    ),
}
