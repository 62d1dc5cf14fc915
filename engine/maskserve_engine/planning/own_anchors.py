"""At which steps an edit's row renews what it keeps of its own: its anchors, the row's one clock.

An edit that reads no template computes all tokens there, and leaves what the steps between read;
one that reads a template its text and ring. What ControlNets find beside a template is renewed by
a clock of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from maskserve_engine.planning.entry_bytes import EntryFormat, block_bytes, end_bytes
from maskserve_engine.planning.flops import ModelWork


class OwnRule(NamedTuple):
    """How rows of a worker keep what is their own."""

    stride: float = 0.35
    """Of ControlNets beside a template: from one step where they compute all tokens to the next, as
    a share of the schedule."""
    format: str = "int8"
    """Storage format."""
    text: bool = True
    """Whether steps between anchors leave the text out, too."""
    ring: bool = False
    """Whether those that do leave out a ring round the mask, too."""
    power: float = 1.0
    """Of sigma: what these nets have found goes on along a line over that."""


OWN_RULE = OwnRule()
"""Where nothing says another."""


def own_steps(
    count: int, sigmas: Sequence[float], evenly_over: float, *, growth: float = 0.0
) -> frozenset[int]:
    """Of which steps so many anchors are: the first, and those nearest to equal parts of the way.

    Args:
        count: of the anchors, at least one.
        sigmas: of the edit's steps, falling.
        evenly_over: the power of sigma that the parts are equal of. A sampler that is shifted to
            large sigmas goes most of the way in its last steps, so anchors lie there, too. 0: parts
            of equally many steps.
        growth: where steps lie between anchors and not behind them: how many times as long each
            part is as the one before. Then the last part, behind them all, is half as long as the
            others on average, and the second step, which foresees, is none. 0: they lie behind.
    """
    steps, parts = len(sigmas), np.ones(count)
    if growth and count > 1:
        parts[:-1] = growth ** np.arange(count - 1)
        parts[-1] = 0.5 * parts[:-1].mean()
    ends = [0.0, *parts.cumsum()[:-1] / parts.sum()]
    if not evenly_over:
        return frozenset(math.ceil(end * steps) for end in ends)
    way, chosen = np.asarray(sigmas) ** evenly_over, [0]
    for number in range(1, count):
        begin = max(chosen[-1] + 1, 1 + (growth > 0))
        ahead = way[begin : steps - count + number + 1]
        target = way[0] * (1 - ends[number])
        chosen.append(begin + int(np.abs(ahead - target).argmin()))
    return frozenset(chosen)


def foreseen_at(anchors: frozenset[int]) -> frozenset[int]:
    """Steps that compute these anchors, of a row that foresees all but the first: where it arrives
    at the one before, and from its second step on, as its first one shows where it goes.
    """
    return frozenset({0} | {max(1, anchor) for anchor in anchors - {max(anchors)}})


def clock_steps(steps: int, stride: float) -> frozenset[int]:
    """Those at which a row that reads a template has its ControlNets compute all tokens: however
    few the steps are.
    """
    return frozenset(range(0, steps, max(2, round(stride * steps))))


def own_bytes(
    work: ModelWork, kept: Sequence[tuple[float, ...]], fmt: EntryFormat, changes: int
) -> int:
    """Bytes of what an edit's anchors leave, at most: keys and values of each block, and the ends
    of stacks where the model needs them.

    Args:
        work: of the model at the edit's size.
        kept: tokens of each pass per level, the text among them if it is left out.
        fmt: storage format.
        changes: that are kept beside them: how they lie on a line from the second anchor on, and
            how that bends from the third one on.
    """
    loads = block_bytes(work, kept, fmt)
    of_one = float(loads[:, 1].sum() + end_bytes(work, loads).sum())
    return int(of_one * (1 + changes))
