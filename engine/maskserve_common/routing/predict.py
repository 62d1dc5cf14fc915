"""The time at which an edit would be done on a worker (FlashPS Algorithm 2, `CalcCost`).

The paper scores the batch that the edit would join by the time of one pipeline pass. This module
follows the edit to its end: rows that end earlier stop costing, waiting edits take their places,
and the edit itself may wait for a place. `profile` gives the work of all others as a function of
steps. An edit that gets a row after `s` steps and takes `n` is done after

    max(step·N + compute·n + busy(N), load·n + loading(N))     N = s + n

No step is simulated. Prefetching lets loads run ahead of the computation over step boundaries, so
the maximum is taken over all steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from maskserve_common.routing.view import Edit, WorkerView


def predicted_seconds(edit: Edit, worker: WorkerView, now: float) -> float:
    """Return the seconds until `edit` would be done on `worker` if it were sent there now.

    Args:
        edit: the edit.
        worker: the worker; `takes(edit)` is not checked.
        now: time on the clock of `WorkerView.as_of`; the worker's progress since then is
            subtracted.
    """
    compute, load, fetch = worker.price(edit)
    step, steps = worker.pricing.step, edit.steps
    profile = worker.profile
    if edit.priority > worker.lowest_priority or edit.due < worker.latest_due:
        urgency, free = (edit.priority, -edit.due), worker.free_rows
        later = (row for row in worker.waiting[free:] if (row.priority, -row.due) >= urgency)
        ahead = (*worker.waiting[:free], *later)
        profile = worker.profile_of(ahead)
    busy, loading = profile.until(profile.free_at + steps)
    edit_s = steps * (step + compute)
    total = max(edit_s + profile.free_at * step + busy, steps * load + loading)
    passed = now - worker.as_of
    if passed > 0.0:
        total = max(total - passed, edit_s)
    fetch = max(fetch, worker.adapter_seconds(edit))
    if fetch > 0.0:
        # Entries, LoRAs and ControlNets come, side by side, while the edit waits for its place.
        waits = profile.free_at * step + profile.until(profile.free_at)[0]
        total += max(fetch - waits, 0.0)
    return total


class Assignment(NamedTuple):
    """Waiting edits, as they would be dealt to workers."""

    edits: dict[str, list[Edit]]
    """Edits by worker."""
    free_s: dict[str, float]
    """Seconds until each worker has a place behind them."""


def assign(edits: Iterable[Edit], workers: Sequence[WorkerView]) -> Assignment:
    """Deal the edits that wait in front of all workers: each goes to the worker with the first free
    place, predicted with the edits before it. So one prediction per worker serves every edit behind
    them.

    Args:
        edits: edits in the order in which they get places.
        workers: workers that may take them, with their rows; without workers nothing is dealt.
    """
    free: list[tuple[float, int]] = []
    for number, worker in enumerate(workers):
        profile = worker.profile
        free_at_s = profile.free_at * worker.pricing.step + profile.until(profile.free_at)[0]
        heapq.heappush(free, (free_at_s, number))
    edits_by_worker: dict[str, list[Edit]] = {worker.worker: [] for worker in workers}
    for edit in edits if workers else ():
        free_at_s, number = free[0]
        worker = workers[number]
        compute, load, _ = worker.price(edit)
        step_s = max(compute + worker.pricing.step / worker.max_rows, load)
        heapq.heapreplace(free, (free_at_s + edit.steps * step_s / worker.devices, number))
        edits_by_worker[worker.worker].append(edit)
    return Assignment(
        edits_by_worker, {workers[number].worker: free_at_s for free_at_s, number in free}
    )
