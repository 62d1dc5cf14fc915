"""When an edit would be done on a worker (FlashPS Algorithm 2, `CalcCost`).

The paper scores the batch that the edit would join by the time of one pipeline pass. Here the
whole way is followed: rows that end before the edit does stop costing anything, edits that wait
take their places, and the edit itself may have to wait for one.

When rows start and end, counted in steps, follows from the numbers of steps alone: each waiting
row takes the place that is free first. With places and steps known, and a step's time a sum over
its rows (see `pricing`), the edit that starts after `s` steps and takes `n` is done after

    max(base·N + Σ compute_r·n_r, Σ load_r·n_r)     N = s + n

where n_r = clip(N - s_r, 0, steps_r) is how many of its steps row r takes until then: no step is
ever simulated. The load sum may run ahead of the computation over step boundaries, as prefetching
does, so the maximum is taken over the whole way.
"""

from __future__ import annotations

from heapq import heapify, heapreplace

from maskserve_core.routing.view import Edit, RowLoad, WorkerView


def predicted_seconds(edit: Edit, worker: WorkerView, now: float) -> float:
    """Seconds from `now` until `edit` would be done on `worker`, were it sent there now.

    Args:
        edit: the edit.
        worker: the worker, whose `takes(edit)` is not asked.
        now: on the clock of `worker.as_of`; what the worker did since then is subtracted.
    """
    compute, load, fetch = worker.price(edit)
    steps = edit.steps
    if len(worker.running) < worker.max_rows and not worker.waiting:
        ahead, busy, loading = 0, 0.0, 0.0
        for left, row_compute, row_load, _, _ in worker.running:
            taken = left if left < steps else steps
            busy += taken * row_compute
            loading += taken * row_load
    else:
        rows, ahead = _places(worker, edit.priority)
        busy, loading = _others(rows, ahead + steps)
    base = worker.pricing.step
    own = steps * (base + compute)
    others = ahead * base + busy
    bound = max(own + others, steps * load + loading) - own
    passed = now - worker.as_of
    if passed > 0.0:
        bound = max(bound - passed, 0.0)
    if fetch:
        # Fetching goes on while the edit waits for its place.
        before = 0.0
        if ahead:
            before = ahead * base + _others(_places(worker, edit.priority)[0], ahead)[0]
        bound += max(fetch - before, 0.0)
    return own + bound


def _places(worker: WorkerView, priority: int) -> tuple[list[tuple[int, RowLoad]], int]:
    """Rows that run or will run before an edit of `priority`, each with the step at which it
    starts, and the step at which the edit can.
    """
    rows = [(0, row) for row in worker.running]
    ends = [row.steps for row in worker.running]
    ends.extend([0] * (worker.max_rows - len(ends)))
    heapify(ends)
    for row in worker.waiting:
        if row.priority >= priority:
            start = ends[0]
            rows.append((start, row))
            heapreplace(ends, start + row.steps)
    return rows, ends[0]


def _others(rows: list[tuple[int, RowLoad]], horizon: int) -> tuple[float, float]:
    """Compute and load seconds that `rows` take in the first `horizon` steps."""
    busy = loading = 0.0
    for start, (left, row_compute, row_load, _, _) in rows:
        if start < horizon:
            taken = min(left, horizon - start)
            busy += taken * row_compute
            loading += taken * row_load
    return busy, loading
