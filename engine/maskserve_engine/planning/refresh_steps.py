"""The schedule of refresh steps, at which an edit's row renews its step cache.

An edit without a template computes all tokens at its refresh steps, and the steps between them read
the keys and values of these. An edit with a template computes its text and ring at them.
ControlNets beside a template have refresh steps of their own (`clock_steps`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from maskserve_engine.planning.entry_bytes import EntryFormat, block_bytes, end_bytes
from maskserve_engine.planning.flops import ModelWork


class RefreshRule(NamedTuple):
    """How rows of a worker fill their step caches."""

    stride: float = 0.35
    """For ControlNets beside a template: share of the schedule between two steps at which they
    compute all tokens.
    """
    format: str = "int8"
    text: bool = True
    """Whether steps between refresh steps leave the text out too."""
    ring: bool = False
    """Whether steps that leave the text out also leave out the ring."""
    power: float = 1.0
    """Power of sigma over which ControlNet results are extrapolated linearly."""


REFRESH_RULE = RefreshRule()


def refresh_steps(
    count: int, sigmas: Sequence[float], evenly_over: float, *, growth: float = 0.0
) -> frozenset[int]:
    """Return the refresh steps: the first step, and the steps nearest to equal parts of sigma.

    Args:
        count: number of refresh steps, at least one.
        sigmas: sigmas of the edit's steps, falling.
        evenly_over: power of sigma over which the parts are equal. With a sampler that is shifted
            to large sigmas, sigma falls most in the last steps, so refresh steps lie there too. 0:
            parts have equally many steps.
        growth: ratio of each part's length to the one before, for rows with lookahead, whose steps
            lie between refresh steps. The last part, after all refresh steps, is then half as long
            as the others on average. The second step, which computes the first lookahead, is no
            refresh step. 0: rows have no lookahead.
    """
    steps, parts = len(sigmas), np.ones(count)
    if growth and count > 1:
        parts[:-1] = growth ** np.arange(count - 1)
        parts[-1] = 0.5 * parts[:-1].mean()
    ends = [0.0, *parts.cumsum()[:-1] / parts.sum()]
    if not evenly_over:
        return frozenset(math.ceil(end * steps) for end in ends)
    distances, chosen = np.asarray(sigmas) ** evenly_over, [0]
    for number in range(1, count):
        begin = max(chosen[-1] + 1, 1 + (growth > 0))
        candidates = distances[begin : steps - count + number + 1]
        target = distances[0] * (1 - ends[number])
        chosen.append(begin + int(np.abs(candidates - target).argmin()))
    return frozenset(chosen)


def lookahead_steps_of(anchors: frozenset[int]) -> frozenset[int]:
    """Return the steps at which a row with lookahead computes all tokens for these refresh steps.

    The first refresh step computes its own tokens. Each refresh step but the last also computes, by
    lookahead, those of the next one. The first does so one step late, since a lookahead needs the
    model's answer at the step before.
    """
    return frozenset({0} | {max(1, anchor) for anchor in anchors - {max(anchors)}})


def clock_steps(steps: int, stride: float) -> frozenset[int]:
    """Return the steps at which the ControlNets of a row that reads a template compute all tokens,
    however few steps there are.
    """
    return frozenset(range(0, steps, max(2, round(stride * steps))))


def step_cache_bytes(
    work: ModelWork, widths: Sequence[tuple[float, ...]], fmt: EntryFormat, changes: int
) -> int:
    """Return the most bytes of an edit's step cache: keys and values of each block, and stack ends
    where the model needs them.

    Args:
        work: work of the model at the edit's size.
        widths: tokens of each pass per level, text included if steps leave it out.
        fmt: storage format.
        changes: number of differences that are kept, too: the slope from the second refresh step
            on, and the curvature from the third on.
    """
    loads = block_bytes(work, widths, fmt)
    nbytes = float(loads[:, 1].sum() + end_bytes(work, loads).sum())
    return int(nbytes * (1 + changes))
