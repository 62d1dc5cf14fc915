"""Helpers for the planner's tests: random costs and a slow simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from maskserve_benchmarks.published_models import FLUX_DEV
from maskserve_common.line_fit import Line
from maskserve_engine.families.flux.spec import flux_work
from maskserve_engine.planning.cost_model import H100, CostModel, estimate
from maskserve_engine.planning.entry_bytes import FORMATS, block_bytes
from maskserve_engine.planning.two_stream import NO_RESTORE, StepCosts, step_costs

INF = math.inf


def costs_of(
    compute: Sequence[Sequence[float]],
    loads: Sequence[Sequence[float]],
    *,
    before: Sequence[float] | None = None,
    after: float = 0.0,
    ends: Sequence[float] | None = None,
    ahead: float = INF,
) -> StepCosts:
    """StepCosts from lists."""
    n = len(compute)
    return StepCosts(
        np.array(compute, dtype=float),
        np.array(loads, dtype=float),
        np.array(before if before is not None else [0.0] * n, dtype=float),
        after,
        np.array(ends if ends is not None else [NO_RESTORE] * n, dtype=float),
        ahead,
    )


@st.composite
def random_costs(draw: st.DrawFn, most: int = 5) -> StepCosts:
    """Costs with ties, missing entries, stack ends, fixed work, equal or unequal blocks, and any
    budget. All are whole numbers, so that sums are exact.
    """
    n = draw(st.integers(1, most))
    number = st.integers(0, 9)
    kinds = st.lists(number, min_size=3, max_size=3)
    if draw(st.booleans()):
        kinds = kinds.map(lambda c: sorted(c, reverse=True))
    rows = draw(st.lists(kinds, min_size=n, max_size=n))
    loads = draw(st.lists(st.tuples(number, number), min_size=n, max_size=n))
    if draw(st.booleans()):
        rows, loads = [rows[0]] * n, [loads[0]] * n
    missing = draw(st.sampled_from((None, None, None, 0, 1)))
    table = [[INF if i == missing else x for i, x in enumerate(pair)] for pair in loads]
    optional = st.one_of(st.just(int(NO_RESTORE)), number)
    return costs_of(
        rows,
        table,
        before=draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)),
        after=draw(st.integers(0, 3)),
        ends=draw(st.lists(optional, min_size=n, max_size=n)),
        ahead=draw(st.one_of(st.just(INF), st.integers(0, 30))),
    )


def simulate(
    steps: Sequence[tuple[int, int, int]], after: int, ahead: float, count: int
) -> list[int]:
    """End times of `count` steps, by moving two streams one tick at a time.

    This is written independently of the recursion. The load stream works while less than `ahead` is
    loaded for blocks that have not begun, or while the compute stream waits for a block.

    Args:
        steps: `(before, load, compute)` per block, whole ticks.
        after: ticks after the last block.
        ahead: budget in ticks.
        count: steps to run.
    """
    program = [s for _ in range(count) for s in (*steps, (after, 0, 0))]
    loaded = begun = time = 0
    ends = []
    for place, (before, load, compute) in enumerate(program):
        for phase, length in (("before", before), ("wait", None), ("compute", compute)):
            if phase == "wait":
                while loaded < begun + load:
                    loaded += 1
                    time += 1
                begun += load
            for _ in range(length or 0):
                time += 1
                if loaded - begun < ahead:
                    loaded += 1
        if (place + 1) % (len(steps) + 1) == 0:
            ends.append(time)
    return ends


def flux_costs(
    gbytes: float, fmt: str = "bfloat16", masks: tuple[float, ...] = (0.11,), **more: float
) -> StepCosts:
    """Costs of FLUX.1 at 1024 x 1024 over a link of this many GB/s, one row per mask ratio."""
    work = flux_work(FLUX_DEV, 128, 128)
    model = CostModel("x", estimate(H100).compute, {"host": Line(0.0, 1e-9 / gbytes)}, "estimate")
    rows = [work.row_at(m, 512) for m in masks]
    loads = block_bytes(work, [(4096 - r.active[0],) for r in rows], FORMATS[fmt])
    return step_costs(work, work.totals(rows), model, {"host": loads}, **more)
