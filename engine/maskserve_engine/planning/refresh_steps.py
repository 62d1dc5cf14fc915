"""The schedule of refresh steps, at which an edit's row renews its step cache.

An edit without a template computes all tokens at its refresh steps, and the steps between them read
the keys and values of these. An edit with a template computes its text and ring at them, and its
ControlNets compute all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from maskserve_common.contracts.reuse_levels import refresh_count
from maskserve_engine.planning.entry_bytes import EntryFormat, block_bytes, end_bytes
from maskserve_engine.planning.flops import ModelWork


class RefreshRule(NamedTuple):
    """How rows of a worker fill their step caches."""

    stride: float = 0.55
    """For an edit with ControlNets that reads a template: share of its steps between two refresh
    steps.
    """
    format: str = "int8"
    text: bool = True
    """Whether steps between refresh steps leave the text out too."""
    ring: bool = False
    """Whether steps that leave the text out also leave out the ring."""


REFRESH_RULE = RefreshRule()


def refresh_steps(
    count: int, sigmas: Sequence[float], evenly_over: float, growth: float
) -> frozenset[int]:
    """Return the refresh steps: the first step, and the steps nearest to equal parts of sigma.

    Args:
        count: number of refresh steps, at least one.
        sigmas: sigmas of the edit's steps, falling.
        evenly_over: power of sigma over which the parts are equal. With a sampler that is shifted
            to large sigmas, sigma falls most in the last steps, so refresh steps lie there too.
        growth: ratio of each part's length to the one before. The last part, after all refresh
            steps, is half as long as the others on average. The second step, which computes the
            first lookahead, is no refresh step.
    """
    steps, parts = len(sigmas), np.ones(count)
    if count > 1:
        parts[:-1] = growth ** np.arange(count - 1)
        parts[-1] = 0.5 * parts[:-1].mean()
    ends = [0.0, *parts.cumsum()[:-1] / parts.sum()]
    distances, chosen = np.asarray(sigmas) ** evenly_over, [0]
    for number in range(1, count):
        begin = max(chosen[-1] + 1, 2)
        candidates = distances[begin : steps - count + number + 1]
        target = distances[0] * (1 - ends[number])
        chosen.append(begin + int(np.abs(candidates - target).argmin()))
    return frozenset(chosen)


def lookahead_steps_of(anchors: frozenset[int], *, delayed: bool = False) -> frozenset[int]:
    """Return the steps at which a row with lookahead computes all tokens for these refresh steps.

    The first refresh step computes its own tokens. Each refresh step but the last also computes, by
    lookahead, those of the next one. The first does so one step late, since a lookahead needs the
    model's answer at the step before; if `delayed`, all do, since the next place depends on the
    error at this one.
    """
    first = min(anchors)
    return frozenset(
        {first} | {max(first + 1, anchor + delayed) for anchor in anchors - {max(anchors)}}
    )


def count_with_controls(steps: int, stride: float) -> int:
    """Return the number of refresh steps of an edit with ControlNets that reads a template: two or
    more, however few steps there are, since a template has nothing of a net.
    """
    return max(refresh_count(steps, stride), 2 if steps > 2 else 1)


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
