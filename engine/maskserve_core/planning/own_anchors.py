"""Which steps of an edit that reads no template are anchors of its own."""

from __future__ import annotations


def own_steps(steps: int, stride: float) -> frozenset[int]:
    """Steps that compute all tokens: the first one, and one of every `stride` of the schedule; none
    where these would be more than half of all.

    Args:
        steps: of the edit.
        stride: as a share of the schedule; 0: none.
    """
    if not stride:
        return frozenset()
    chosen = frozenset(range(0, steps, max(1, round(stride * steps))))
    return chosen if 2 * len(chosen) <= steps else frozenset()
