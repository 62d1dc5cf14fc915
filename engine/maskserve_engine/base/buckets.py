"""Numbers of tokens of which there are few, for what is made anew for each number."""

from __future__ import annotations


def bucket(count: int, most: int | None = None) -> int:
    """So many tokens are computed for `count`: at most an eighth more, and from 64 on; below, the
    next multiple of 8. Between a power of two and the next there are eight.

    Args:
        count: of tokens.
        most: there are; None: any number.
    """
    step = max(8, 1 << max(0, count.bit_length() - 4))
    rounded = -(-count // step) * step
    return rounded if most is None else min(most, rounded)
