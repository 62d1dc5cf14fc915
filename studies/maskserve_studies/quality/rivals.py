"""Another cache at an equal saving: diffusers' FirstBlockCache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from maskserve_studies.quality.metrics import Picture

ByClass = dict[str, list[Picture]]
_PROBE = 1
"""Edits of each class for the search of the threshold."""
_THRESHOLDS = (0.1, 0.2, 0.3, 0.45, 0.7, 1.0, 1.5)


class _BlockCalls:
    """Counts the transformer blocks that are really computed."""

    def __init__(self, blocks: list[Any]) -> None:
        self.calls = 0
        # A skipped block does not call its first norm.
        norms = [block.norm1 if hasattr(block, "norm1") else block.norm for block in blocks]
        self._hooks = [norm.register_forward_hook(self._count) for norm in norms]

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def first_block_cache(
    pipe: Any, run: Callable[[int], ByClass], edits: int, speedup: float
) -> tuple[ByClass, float, float]:
    """Make edits of each class with the threshold whose saving is nearest to `speedup`.

    Args:
        pipe: FluxFillPipeline.
        run: makes the first edits of each class with the pipeline, as many as its argument says,
            one at a time, because the cache holds one state for a whole batch.
        edits: number of edits to make of each class.
        speedup: target for all block calls over computed block calls.

    Returns:
        pictures, threshold, and the reached saving in block calls.
    """
    best = (float("inf"), _THRESHOLDS[0])
    for threshold in _THRESHOLDS:
        _, saving = _with_threshold(pipe, run, min(_PROBE, edits), threshold)
        best = min(best, (abs(saving - speedup), threshold))
        if saving > speedup:
            break
    pictures, saving = _with_threshold(pipe, run, edits, best[1])
    return pictures, best[1], saving


def _with_threshold(
    pipe: Any, run: Callable[[int], ByClass], edits: int, threshold: float
) -> tuple[ByClass, float]:
    from diffusers.hooks import FirstBlockCacheConfig

    transformer = pipe.transformer
    blocks = [*transformer.transformer_blocks, *transformer.single_transformer_blocks]
    transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    counter = _BlockCalls(blocks)
    forward = transformer.forward

    def in_context(*args: Any, **kwargs: Any) -> Any:
        # FluxFillPipeline does not name a cache context, and forgets it at the end of every call.
        with transformer.cache_context("edit"):
            return forward(*args, **kwargs)

    transformer.forward = in_context
    try:
        pictures = run(edits)
    finally:
        del transformer.forward
        counter.close()
        transformer.disable_cache()
    steps, picture_count = len(pipe.scheduler.timesteps), sum(map(len, pictures.values()))
    return pictures, len(blocks) * steps * picture_count / counter.calls
