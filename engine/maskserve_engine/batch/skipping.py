"""FirstBlockCache's rule, row by row (diffusers has it for whole batches: first_block_cache.py).

If the first block's residual is nearly the same as when the other blocks were last computed, the
step skips these and adds their last result again. Each row decides for itself, whatever rows share
its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from maskserve_engine.batch.forward import State, Transformer
from maskserve_engine.batch.packing import Packed


@dataclass(slots=True, eq=False)
class FirstBlockCache:
    threshold: float
    """Relative change of the first block's residual below which the other blocks are skipped."""
    heads: list[Tensor] = field(default_factory=list)
    """[n, width] per pass: the first block's residual when the others were last computed."""
    tails: list[Tensor] = field(default_factory=list)
    """[n, width] per pass: the others' residual at that step."""
    skipped: int = 0

    def change(self, heads: Sequence[Tensor]) -> Tensor:
        """Return the relative change of the pass that changed most; infinite if there is nothing to
        compare.
        """
        if [head.shape for head in heads] != [last.shape for last in self.heads]:
            return torch.full((), torch.inf, device=heads[0].device)
        changes = [
            (head - last).abs().mean() / last.abs().mean()
            for head, last in zip(heads, self.heads, strict=True)
        ]
        return torch.stack(changes).max().float()


class Skipper(NamedTuple):
    cache: FirstBlockCache
    passes: tuple[int, ...]
    """Places of the row among the packed rows: one, or two with a negative prompt."""


def forward_skipping(
    model: Transformer,
    packed: Packed,
    kinds: Sequence[str],
    skippers: Sequence[Skipper],
) -> Tensor:
    """Run `forward`, but skip all blocks after the first for `skippers` whose change is small."""
    state = State(model, packed, kinds)
    initial, lengths = state.image, state.stream.lengths
    state.run(0, 1)
    first = state.computed_image()
    heads, firsts = (first - initial).split(lengths), first.split(lengths)
    changes = [skipper.cache.change([heads[i] for i in skipper.passes]) for skipper in skippers]
    # The host waits here for the device, once for all rows (docs/gpu.md).
    change_values = torch.stack(changes).cpu().numpy()
    skipping = [
        skipper
        for skipper, change in zip(skippers, change_values, strict=True)
        if change < skipper.cache.threshold
    ]
    outputs = _finish(state, firsts, skipping)
    image = torch.cat(outputs)
    for skipper in skippers:
        if skipper in skipping:
            skipper.cache.skipped += 1
        else:
            skipper.cache.heads = [heads[i].clone() for i in skipper.passes]
            skipper.cache.tails = [outputs[i] - firsts[i] for i in skipper.passes]
    return model.last(image, state.stream)


def _finish(state: State, firsts: Sequence[Tensor], skipping: Sequence[Skipper]) -> list[Tensor]:
    """Return [n, width] per packed row after all blocks; `firsts` are its tokens after the first
    block.
    """
    tails = {
        i: tail
        for skipper in skipping
        for i, tail in zip(skipper.passes, skipper.cache.tails, strict=True)
    }
    remaining = [i for i in range(len(firsts)) if i not in tails]
    ended: dict[int, Tensor] = {i: firsts[i] + tail for i, tail in tails.items()}
    if remaining:
        part = state.part(remaining) if tails else state
        part.run(1, part.model.block_count)
        ended |= zip(remaining, part.computed_image().split(part.stream.lengths), strict=True)
    return [ended[i] for i in range(len(firsts))]
