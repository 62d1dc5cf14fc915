"""The best number of blocks of each sort and kind: a bound on a step's time, and plans near it.

A model has few sorts of blocks: FLUX and SDXL have two each. If the load and compute streams never
waited for one another, a steady step would take max(all loads, all compute), and only the number of
blocks per sort and kind would matter. These counts are few enough to try all of them. Plans that
spread the kinds evenly over the step usually reach the bound, which proves them optimal.

The counts determine the loads. Within a stack of equally large entries, a dense block's load of `h`
saves that of the next `project` block, which finds the cached states present, or that of the
stack's end. So dense blocks count as if they loaded nothing. A stack that needs nothing at its end
saves one `h` more, since cached states are also present at its start.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from maskserve_engine.planning.flops import DENSE, KV, PROJECT, Floats
from maskserve_engine.planning.two_stream import Item

_MAX_SORTS = 5
_MAX_PAIRS = 200_000
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Sort:
    """Blocks that cost the same; `compute` as in KINDS."""

    blocks: tuple[int, ...]
    h: float
    kv: float
    compute: tuple[float, float, float]


@dataclass(frozen=True)
class BestCounts:
    """The best counts of a step."""

    bound: float
    """Seconds below which no steady step is possible."""
    plans: Iterator[list[int]]
    """Plans (the kind of each block) that may reach the bound, made lazily, the most even first."""


def sorts_of(items: Sequence[Item]) -> list[Sort]:
    """Return the sorts of a step, in order of their first block."""
    groups: dict[tuple[float, ...], list[int]] = {}
    for item in items:
        if item.block >= 0:
            groups.setdefault(item[1:6], []).append(item.block)
    return [Sort(tuple(b), k[0], k[1], (k[2], k[3], k[4])) for k, b in groups.items()]


def best_counts(
    items: Sequence[Item], sorts: Sequence[Sort], fixed: float, tolerance: float
) -> BestCounts | None:
    """Return the counts with the least max(all loads, all compute).

    Often many counts are nearly as good, because sorts differ little. Of these it prefers counts
    that give each sort the same mixture of kinds, since a run of blocks of one kind makes one
    stream wait.

    Args:
        items: items of the step.
        sorts: sorts of the items.
        fixed: seconds of compute outside the blocks.
        tolerance: share by which a step may be longer for the sake of an even mixture.

    Returns:
        None: counts do not determine the loads (entries of a stack differ, or there is no `h`), or
        there are too many.
    """
    saving = _start_saving(items)
    if saving is None or len(sorts) > _MAX_SORTS:
        return None
    fronts = [_front_of(sort) for sort in sorts]
    # All sorts but the last are joined into one Pareto front; `chosen[i]` indexes that of sort i.
    sums: Floats = np.zeros((1, 2))
    chosen: list[NDArray[np.intp]] = []
    for i, (_, costs) in enumerate(fronts[:-1]):
        if len(sums) * len(costs) > _MAX_PAIRS:
            return None
        joined = (sums[:, None] + costs[None]).reshape(-1, 2)
        pareto_ids = _pareto(joined) if i else np.arange(len(joined))
        left, right = np.divmod(pareto_ids, len(costs))
        sums, chosen = joined[pareto_ids], [c[left] for c in chosen] + [right]
    last = fronts[-1][1]
    if len(sums) * len(last) > _MAX_PAIRS:
        return None
    loads = sums[:, 0, None] + (last[:, 0] - saving)
    compute = sums[:, 1, None] + (last[:, 1] + fixed)
    steps = np.maximum(np.maximum(loads, compute), 0.0).ravel()
    best = int(steps.argmin())
    near = np.flatnonzero(steps <= steps[best] * (1 + tolerance / 2))

    def counts_at(picks: NDArray[np.intp]) -> list[NDArray[np.int64]]:
        """Return the counts per sort, `[picks, 3]` each."""
        left, right = np.divmod(picks, len(last))
        rows = [c[left] for c in chosen] + [right]
        return [front[0][row] for front, row in zip(fronts, rows, strict=True)]

    def plans() -> Iterator[list[int]]:
        shares = [c / len(s.blocks) for c, s in zip(counts_at(near), sorts, strict=True)]
        unlike = sum(np.abs(share - shares[0]).sum(axis=1) for share in shares)
        even = int(near[int(np.argmin(unlike))])
        for pick in dict.fromkeys((even, best)):
            counts = [c[0].tolist() for c in counts_at(np.array([pick]))]
            for arrange in (_spread, _balance):
                kinds = arrange(items, sorts, counts)
                if saving and sorts[0].blocks[0] == 0:
                    _use_saving(kinds, sorts[0].blocks)
                yield kinds

    return BestCounts(float(steps[best]), plans())


def best_weight(sorts: Sequence[Sort], fixed: float, start: float) -> float:
    """Return the weight of the load stream's clock, 0 to 1, with the highest lower bound of a step.
    The bound is concave in it, so a golden-section search finds it.

    It ignores that cached states may be present, so the bound is a little lower than it could be.

    Args:
        sorts: sorts of the step's blocks.
        fixed: seconds of compute outside the blocks.
        start: start of the load stream's clock.
    """
    terms = [(len(s.blocks), s.h, s.kv, *s.compute) for s in sorts]

    def bound(w: float) -> float:
        v = 1 - w
        total = w * start + v * fixed
        for n, h, kv, dense, project, cached in terms:
            total += n * min(v * dense, w * h + v * project, w * kv + v * cached)
        return total

    low, high = 1e-6, 1 - 1e-6
    a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_a, at_b = bound(a), bound(b)
    for _ in range(16):
        if at_a < at_b:
            low, a, at_a = a, b, at_b
            b = low + _GOLDEN * (high - low)
            at_b = bound(b)
        else:
            high, b, at_b = b, a, at_a
            a = high - _GOLDEN * (high - low)
            at_a = bound(a)
    return a if at_a > at_b else b


def _start_saving(items: Sequence[Item]) -> float | None:
    """Return the most seconds of loads that the starts of stacks save; None: entries of a stack
    differ, or have no `h`.
    """
    saving, size = 0.0, -1.0
    for item in items:
        if size < 0:
            size = item.h
        if item.h != size or math.isinf(size):
            return None
        if item.block < 0:
            size = -1.0
    if items[-1].block >= 0:
        saving = size
    return saving


@lru_cache(maxsize=64)
def _counts(n: int) -> NDArray[np.int64]:
    """Return all counts of three kinds among n blocks: `[counts, 3]`."""
    return np.array([(n - p - k, p, k) for p in range(n + 1) for k in range(n - p + 1)])


def _front_of(sort: Sort) -> tuple[NDArray[np.int64], Floats]:
    """Return the Pareto front of a sort: its counts than which no others have both less loads and
    less compute, and these two sums.
    """
    counts = _counts(len(sort.blocks))
    if math.isinf(sort.kv):
        counts = counts[counts[:, KV] == 0]
    loads = counts[:, PROJECT] * sort.h
    if not math.isinf(sort.kv):
        loads = loads + counts[:, KV] * sort.kv
    costs = np.stack((loads, counts @ np.array(sort.compute)), axis=1)
    pareto_ids = _pareto(costs)
    return counts[pareto_ids], costs[pareto_ids]


def _pareto(costs: Floats) -> NDArray[np.intp]:
    order = np.lexsort((costs[:, 1], costs[:, 0]))
    second = costs[order, 1]
    best_before = np.concatenate(([math.inf], np.minimum.accumulate(second)[:-1]))
    pareto_ids: NDArray[np.intp] = order[second < best_before]
    return pareto_ids


def _spread(items: Sequence[Item], sorts: Sequence[Sort], counts: Sequence[list[int]]) -> list[int]:
    """Return the kind of each block, with the kinds of each sort spaced as evenly as possible. In a
    tie, `project` comes first.
    """
    kinds = [DENSE] * sum(item.block >= 0 for item in items)
    for sort, targets in zip(sorts, counts, strict=True):
        assigned, total = [0, 0, 0], len(sort.blocks)
        for i, block in enumerate(sort.blocks, 1):
            kind = max((PROJECT, KV, DENSE), key=lambda k: targets[k] * i - assigned[k] * total)
            assigned[kind] += 1
            kinds[block] = kind
    return kinds


def _use_saving(kinds: list[int], alike: Sequence[int]) -> None:
    """Move a `project` block of the first sort to the start, where it loads nothing, if there is
    one.
    """
    swap_block = next((block for block in alike if kinds[block] == PROJECT), 0)
    kinds[0], kinds[swap_block] = kinds[swap_block], kinds[0]


def _balance(
    items: Sequence[Item], sorts: Sequence[Sort], counts: Sequence[list[int]]
) -> list[int]:
    """Return the kind of each block that keeps compute and loads closest, fixed work included."""
    sort_of = {block: i for i, sort in enumerate(sorts) for block in sort.blocks}
    remaining = [list(c) for c in counts]
    kinds = [DENSE] * len(sort_of)
    ahead, present = 0.0, True
    for item in items:
        ahead += item.before
        h = 0.0 if present else item.h
        if item.block < 0:
            ahead, present = ahead - h, True
            continue
        sort_counts = remaining[sort_of[item.block]]
        change = (item.dense - h, item.project - h, item.cached - item.kv)
        start = ahead
        kind = min((k for k in range(3) if sort_counts[k]), key=lambda k: abs(start + change[k]))
        sort_counts[kind] -= 1
        kinds[item.block] = kind
        ahead, present = ahead + change[kind], kind == DENSE
    return kinds
