"""Another cache at an equal saving: diffusers' FirstBlockCache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quality.metrics import Picture

_THRESHOLDS = (0.03, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.9, 1.5, 3.0)


class _BlockCalls:
    """Counts the transformer blocks that are really computed."""

    def __init__(self, blocks: list[Any]) -> None:
        self.calls = 0
        # A skipped block does not reach its first norm.
        norms = [block.norm1 if hasattr(block, "norm1") else block.norm for block in blocks]
        self._hooks = [norm.register_forward_hook(self._count) for norm in norms]

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def first_block_cache(
    pipe: Any, run: Callable[[], list[Picture]], speedup: float
) -> tuple[list[Picture], float, float]:
    """Edits with the threshold whose saving comes nearest to `speedup`.

    Args:
        pipe: FluxFillPipeline.
        run: makes the edits with it, one at a time: the cache holds one state for a whole batch.
        speedup: all block calls over computed ones, to be reached.

    Returns:
        pictures, threshold, and the saving in block calls that was reached.
    """
    from diffusers.hooks import FirstBlockCacheConfig

    transformer = pipe.transformer
    blocks = [*transformer.transformer_blocks, *transformer.single_transformer_blocks]
    best: tuple[float, list[Picture], float, float] | None = None
    for threshold in _THRESHOLDS:
        transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
        counter = _BlockCalls(blocks)
        forward = transformer.forward

        def in_context(*args: Any, forward: Any = forward, **kwargs: Any) -> Any:
            # FluxFillPipeline names no cache context, and forgets it at every call's end.
            with transformer.cache_context("edit"):
                return forward(*args, **kwargs)

        transformer.forward = in_context
        try:
            pictures = run()
        finally:
            del transformer.forward
            counter.close()
            transformer.disable_cache()
        saving = len(blocks) * len(pipe.scheduler.timesteps) * len(pictures) / counter.calls
        if best is None or abs(saving - speedup) < best[0]:
            best = (abs(saving - speedup), pictures, threshold, saving)
        if saving > speedup:
            break
    assert best is not None
    return best[1], best[2], best[3]
