"""States of a job, as the store, its clients and the metrics name them, and the size of a page."""

from __future__ import annotations

QUEUED, RUNNING = "queued", "running"
SUCCEEDED, FAILED, CANCELLED = "succeeded", "failed", "cancelled"
ENDS = (SUCCEEDED, FAILED, CANCELLED)
MOST_LISTED = 100
"""Most jobs in a page of `GET /v1/jobs`."""
