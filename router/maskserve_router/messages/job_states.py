"""States of a job, as the store, its clients and the metrics name them."""

from __future__ import annotations

QUEUED, RUNNING = "queued", "running"
SUCCEEDED, FAILED, CANCELLED = "succeeded", "failed", "cancelled"
ENDS = (SUCCEEDED, FAILED, CANCELLED)
