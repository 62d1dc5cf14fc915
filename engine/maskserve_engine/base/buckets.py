"""Rounds token counts to a few sizes, for work that is compiled for each count."""

from __future__ import annotations


def bucket(count: int, most: int | None = None) -> int:
    """Return the padded token count that is computed for `count` tokens: at most an eighth more
    from 64 on, the next multiple of 8 below. There are eight buckets between a power of two and the
    next. No bucket is larger than `most`.
    """
    step = max(8, 1 << max(0, count.bit_length() - 4))
    rounded = -(-count // step) * step
    return rounded if most is None else min(most, rounded)
