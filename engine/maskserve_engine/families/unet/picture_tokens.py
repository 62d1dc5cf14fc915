"""A picture's tokens beside the prompt's, in the cross attentions of rows with an IP-Adapter
(`adapters.ip_adapter`). Their keys and values are the row's from its first step to its last.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from maskserve_engine.batch.transfer import moved
from maskserve_engine.layers.attention import Segments, Span, attention, segments

PictureKeys = tuple[Tensor, ...]
"""[tokens, 2, width] of each cross attention, in the order they run; empty: there is no picture.
The values hold the scale."""


def picture_keys_of(packed: Tensor, widths: Sequence[int], scale: float) -> PictureKeys:
    """Return a picture's keys and values by cross attention.

    Args:
        packed: [tokens, W] (`ip_adapter.PICTURE_KEYS`).
        widths: width of each cross attention.
        scale: factor of what the picture adds.
    """
    ends = accumulate((2 * width for width in widths), initial=0)
    parts = [packed[:, begin:end].unflatten(1, (2, -1)) for begin, end in pairwise(ends)]
    return tuple([torch.stack((part[:, 0], scale * part[:, 1]), 1) for part in parts])


class PictureTokens:
    """The pictures of a batch's passes, packed."""

    def __init__(self, by_pass: Sequence[PictureKeys]) -> None:
        self._by_pass = [keys for keys in by_pass if keys]
        self._passes = [place for place, keys in enumerate(by_pass) if keys]
        self._packed: dict[int, Tensor] = {}
        """[tokens, 2, width] by number of the block."""
        self._rows: dict[tuple[Span, ...], Segments] = {}
        """Segments by the spans of all passes' queries."""

    def __bool__(self) -> bool:
        return bool(self._passes)

    def added(self, number: int, query: Tensor, mixed: Tensor, passes: tuple[Span, ...]) -> Tensor:
        """Add what queries read of their pass's picture to what they read of the text.

        Args:
            number: number of the block in the UNet.
            query: [n, heads, head_dim] of the computed tokens.
            mixed: [n, heads, head_dim] attention to the text.
            passes: span of each pass among the computed tokens.
        """
        if not self:
            return mixed
        if number not in self._packed:
            self._packed[number] = torch.cat([keys[number] for keys in self._by_pass])
        keys, values = self._packed[number].unflatten(2, query.shape[1:]).unbind(1)
        spans = [passes[place] for place in self._passes]
        if passes not in self._rows:
            lengths = [end - begin for begin, end in spans]
            tokens = [len(keys_of_pass[0]) for keys_of_pass in self._by_pass]
            self._rows[passes] = moved(segments(lengths, tokens), query.device)
        rows = self._rows[passes]
        read = attention(torch.cat([query[begin:end] for begin, end in spans]), keys, values, rows)
        total = mixed.clone()
        for (begin, end), (first, last) in zip(spans, rows.q_spans, strict=True):
            total[begin:end] += read[first:last]
        return total
