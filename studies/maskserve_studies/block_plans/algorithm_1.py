"""FlashPS Algorithm 1: the plan of the paper, for comparison with ours."""

from __future__ import annotations

from collections.abc import Sequence


def algorithm_1(
    cached: Sequence[float], dense: Sequence[float], load: Sequence[float]
) -> tuple[list[bool], float]:
    """Return the paper's greedy choice. The paper has one C and one L per model; here each block
    has its own.

    Args:
        cached: seconds of each block with the cache.
        dense: seconds of each block without.
        load: seconds to load each block's entries.

    Returns:
        Which blocks use the cache, and the resulting seconds.
    """
    compute_end = load_end = 0.0
    use = []
    for with_cache, without, loading in zip(cached, dense, load, strict=True):
        ready = max(load_end + loading, compute_end) + with_cache
        use.append(ready <= compute_end + without)
        if use[-1]:
            load_end += loading
            compute_end = ready
        else:
            compute_end += without
    return use, compute_end
