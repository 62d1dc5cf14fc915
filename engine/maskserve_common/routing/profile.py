"""The work of a worker's rows as a function of a horizon in steps.

When rows start and end, counted in steps, follows from their numbers of steps alone: each waiting
row takes the place that is free first. Row r, which starts at step s_r and takes n_r, has taken
clip(h - s_r, 0, n_r) of them by step h. The sum over rows of that times a cost is linear between
the starts and ends ("knots") of rows, so it is kept as its value and slope at each knot:

    work
     |            ______    a row ends: flatter
     |         __/
     |      _--       a row starts: steeper
     |    _/
     +---|---|----|-----|---> h
      knots
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from heapq import heapify, heapreplace
from itertools import pairwise
from typing import NamedTuple


class RowLoad(NamedTuple):
    """A running or waiting row as a policy sees it."""

    steps: int
    compute: float
    """Seconds of computation per step."""
    load: float
    """Seconds of loading per step."""
    tokens: int
    """Tokens computed per step."""
    priority: int = 0
    due: float = math.inf
    """Due time on the policies' clock; infinite: none."""


class Profile(NamedTuple):
    """Work ahead of a new row. Parallel tuples, one element per knot."""

    free_at: int
    """Step at which a new row gets a place."""
    knots: tuple[int, ...]
    """Steps of the knots, ascending from 0."""
    busy: tuple[float, ...]
    """Seconds of computation before the knot."""
    busy_slope: tuple[float, ...]
    """Seconds of computation per step after it."""
    loading: tuple[float, ...]
    loading_slope: tuple[float, ...]

    def until(self, horizon: int) -> tuple[float, float]:
        """Seconds of computation and of loading in the first `horizon` steps (at least 0)."""
        i = bisect_right(self.knots, horizon) - 1
        beyond = horizon - self.knots[i]
        return (
            self.busy[i] + self.busy_slope[i] * beyond,
            self.loading[i] + self.loading_slope[i] * beyond,
        )


def build_profile(running: Sequence[RowLoad], waiting: Iterable[RowLoad], max_rows: int) -> Profile:
    """The profile of a worker with these rows; `waiting` in the order in which they get places."""
    changes: dict[int, list[float]] = {0: [0.0, 0.0]}  # step -> change of the two slopes

    def add(start: int, row: RowLoad) -> int:
        end = start + row.steps
        for step, sign in ((start, 1.0), (end, -1.0)):
            change = changes.setdefault(step, [0.0, 0.0])
            change[0] += sign * row.compute
            change[1] += sign * row.load
        return end

    ends = [add(0, row) for row in running]
    ends.extend([0] * (max_rows - len(ends)))
    heapify(ends)
    for row in waiting:
        heapreplace(ends, add(ends[0], row))
    knots = sorted(changes)
    busy, loading = [0.0], [0.0]
    busy_slope, loading_slope = [changes[0][0]], [changes[0][1]]
    for previous, knot in pairwise(knots):
        busy.append(busy[-1] + busy_slope[-1] * (knot - previous))
        loading.append(loading[-1] + loading_slope[-1] * (knot - previous))
        busy_slope.append(busy_slope[-1] + changes[knot][0])
        loading_slope.append(loading_slope[-1] + changes[knot][1])
    return Profile(
        ends[0],
        tuple(knots),
        tuple(busy),
        tuple(busy_slope),
        tuple(loading),
        tuple(loading_slope),
    )
