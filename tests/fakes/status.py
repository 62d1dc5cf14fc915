"""A status record of a worker that is ready."""

from __future__ import annotations

from maskserve_common.contracts.status_record import WorkerStatus

READY = WorkerStatus(
    worker="worker-0",
    model="tiny",
    state="ready",
    max_rows=8,
    max_waiting=256,
    counters={"steps_total": 10, "step_seconds_total": 0.1},
)
