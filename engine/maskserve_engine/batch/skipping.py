"""FirstBlockCache's rule, row by row; for whole batches diffusers has it (first_block_cache.py).

A step whose first block adds nearly what it added when the other blocks were last computed leaves
these out, and adds what they added then. Each row decides for itself: the others of its batch go on
without it.
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
    """What a row that may skip remembers between its steps."""

    threshold: float
    """Relative change of what the first block adds, below which the others are left out."""
    heads: list[Tensor] = field(default_factory=list)
    """[n, width] per pass: what the first block added when the others were last computed."""
    tails: list[Tensor] = field(default_factory=list)
    """[n, width] per pass: what the others added then."""
    skipped: int = 0
    """Steps that left them out."""

    def change(self, heads: Sequence[Tensor]) -> Tensor:
        """Of the pass that changed most; infinite where there is nothing to compare with."""
        if [head.shape for head in heads] != [last.shape for last in self.heads]:
            return torch.full((), torch.inf, device=heads[0].device)
        changes = [
            (head - last).abs().mean() / last.abs().mean()
            for head, last in zip(heads, self.heads, strict=True)
        ]
        return torch.stack(changes).max().float()


class Skipper(NamedTuple):
    """A row that may skip, and where it is packed."""

    cache: FirstBlockCache
    passes: tuple[int, ...]
    """Its places among the packed rows: one, or a second for its negative prompt."""


def forward_skipping(
    model: Transformer,
    packed: Packed,
    kinds: Sequence[str],
    skippers: Sequence[Skipper],
) -> Tensor:
    """As `forward`, but `skippers` leave all blocks but the first out where little has changed."""
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
    """[n, width] per packed row after all blocks.

    Args:
        state: of all rows after the first block.
        firsts: [n, width] per packed row: its computed image tokens there.
        skipping: the rows that leave the other blocks out.
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
