"""The record of an edit's end: a log line, counts in metrics, and the end of its span."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

from maskserve_common.contracts.due_times import OK, slo_outcome
from maskserve_common.contracts.request import EditKind
from maskserve_common.errors import MaskserveError, Overloaded
from maskserve_common.observations import Observations
from maskserve_common.tracing import OpenSpan
from maskserve_triton.metric_table import outcome_of

log = logging.getLogger("maskserve.edit")

_FROM_META = (
    "seed", "kind", "template_id", "mask_ratio", "mask_ring", "active_tokens", "total_tokens",
    "computed_tokens", "steps", "steps_skipped", "cache", "batch_mean", "due_ms", "slack_ms", "slo",
)  # fmt: skip
_LEVELS = {
    "done": logging.INFO,
    "cancelled": logging.INFO,
    "refused": logging.INFO,  # the client's error; a full queue is a warning
    "deadline": logging.WARNING,
    "failed": logging.ERROR,
}


class RequestLog:
    """Records the end of one edit that a front has accepted.

    Args:
        model: name of the front.
        observations: metrics that count the edit.
        leave: removes the edit from the worker's admission count.
        span: span of the edit, parent of the spans of its work.
    """

    def __init__(
        self,
        model: str,
        observations: Observations,
        leave: Callable[[], None],
        span: OpenSpan | None = None,
    ) -> None:
        self._model, self._observations, self._leave = model, observations, leave
        self.span = span or OpenSpan()
        self._accepted = time.monotonic()
        self.request_id = ""
        self.kind: EditKind = "inpaint"
        self.encodes = False
        """Whether it ends with its encoder and counts as no edit."""
        self.due = False
        self.slack_s = 0.0
        """Seconds from the answer to the due time; negative: the answer was late."""

    def record_end(self, error: MaskserveError | None, outputs: dict[str, Any]) -> None:
        """Record the final answer, which has been sent: an error, or else `outputs`."""
        self._leave()
        taken_s = time.monotonic() - self._accepted
        code = OK if error is None else error.code
        outcome = outcome_of(code)
        self.span.end(error, request_id=self.request_id, outcome=outcome)
        name = "encoding" if self.encodes else "edit"
        if not self.encodes:
            self._observations.add("edit_ends_total", 1.0, self._model, outcome, code)
            if error is None:
                self._observations.add("edit_seconds", taken_s, self._model)
                self._observations.add("edit_kinds_total", 1.0, self._model, self.kind)
            self._count_outcome(code)
        level = logging.WARNING if code == Overloaded.code else _LEVELS[outcome]
        if not log.isEnabledFor(level):
            return
        details = _meta_fields(outputs["META"]) if error is None else {"error": error.message}
        fields = {"outcome": outcome, "code": code, "total_ms": round(1e3 * taken_s, 3), **details}
        if traceparent := self.span.traceparent:
            fields["trace_id"] = traceparent.split("-")[1]
        extra = {"event": name, "request_id": self.request_id, "fields": fields}
        log.log(level, "%s %s", name, outcome, extra=extra)

    def _count_outcome(self, code: str) -> None:
        """Count whether the edit was in time, if it has a due time."""
        outcome = slo_outcome(code, self.slack_s) if self.due else None
        if outcome is None:
            return
        self._observations.add("slo_total", 1.0, self._model, outcome)
        if code == OK:
            self._observations.add("slack_seconds", self.slack_s, self._model)


def _meta_fields(raw: bytes) -> dict[str, Any]:
    """Return the fields of META that the log line repeats."""
    meta = json.loads(raw)
    fields = {name: meta[name] for name in _FROM_META if name in meta}
    timings = meta.get("timings_ms", {})
    return {**fields, **{f"{stage}_ms": duration_ms for stage, duration_ms in timings.items()}}
