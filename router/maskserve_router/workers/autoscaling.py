"""The number of servers that the present load needs."""

from __future__ import annotations

import math
from collections.abc import Iterable

from maskserve_common.contracts.status_record import BUSY_SHARE
from maskserve_router.workers.worker import Worker


def servers_needed(busy: float) -> int:
    """Return the number of servers for load that keeps `busy` of them busy; at least one."""
    return max(1, math.ceil(busy / BUSY_SHARE))


def workers_needed(workers: Iterable[Worker]) -> dict[str, int]:
    """Return the number of workers for each model, from the edits that run and wait there."""
    rows: dict[str, float] = {}
    for worker in workers:
        if worker.up and (status := worker.status) is not None:
            edits = len(status.running) + len(status.waiting)
            rows[status.model] = rows.get(status.model, 0.0) + edits / status.max_rows
    return {model: servers_needed(busy) for model, busy in sorted(rows.items())}
