"""A picture's tokens beside the prompt's, in the attentions of rows with an IP-Adapter
(`adapters.ip_adapter`). Their keys and values are the row's from its first step to its last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from maskserve_engine.base.job import Conditioning
from maskserve_engine.batch.transfer import moved
from maskserve_engine.layers.attention import Segments, Span, attention, segments

PICTURE_KEYS = "picture_keys"
"""Name, among a prompt's arrays, of [tokens, W]: for each attention that reads the picture, in the
order they run, a token's keys, then its values."""
PictureKeys = tuple[Tensor, ...]
"""[tokens, 2, width] of each such attention, in the order they run; empty: there is no picture. The
values hold the scale."""


def packed_keys_of(conditioning: Conditioning | None, dtype: torch.dtype) -> Tensor | None:
    """Return the keys and values among a prompt's arrays (`PICTURE_KEYS`); None without any."""
    array = None if conditioning is None else conditioning.get(PICTURE_KEYS)
    return None if array is None else torch.from_numpy(array).to(dtype)


def picture_keys_of(packed: Tensor, widths: Sequence[int], scale: float) -> PictureKeys:
    """Return a picture's keys and values by attention.

    Args:
        packed: [tokens, W] (`PICTURE_KEYS`).
        widths: width of each attention that reads the picture.
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
        """[tokens, 2, width] by number of the attention."""
        self._rows: dict[tuple[int, ...], Segments] = {}
        """Segments by the number of each pass's queries."""

    @classmethod
    def of(cls, by_pass: Sequence[PictureKeys]) -> PictureTokens | None:
        """Return the pictures of passes; None: no pass has one."""
        return cls(by_pass) if any(by_pass) else None

    def read(self, number: int, query_of: Callable[[int], Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yield each pass with a picture, and what its queries read of it, [n, heads, head_dim].

        Args:
            number: number of the attention among those that read the picture.
            query_of: returns [n, heads, head_dim] queries of a pass.
        """
        queries = [query_of(place) for place in self._passes]
        if number not in self._packed:
            self._packed[number] = torch.cat([keys[number] for keys in self._by_pass])
        keys, values = self._packed[number].unflatten(2, queries[0].shape[1:]).unbind(1)
        lengths = tuple(map(len, queries))
        if lengths not in self._rows:
            tokens = [len(keys_of_pass[0]) for keys_of_pass in self._by_pass]
            self._rows[lengths] = moved(segments(lengths, tokens), keys.device)
        answer = attention(torch.cat(queries), keys, values, self._rows[lengths])
        yield from zip(self._passes, answer.split(lengths), strict=True)

    def added(self, number: int, query: Tensor, mixed: Tensor, passes: tuple[Span, ...]) -> Tensor:
        """Add what queries read of their pass's picture to what they read of the text.

        Args:
            number: as in `read`.
            query: [n, heads, head_dim] of the computed tokens.
            mixed: [n, heads, head_dim] attention to the text.
            passes: span of each pass among the computed tokens.
        """
        total = mixed.clone()
        for place, read in self.read(number, lambda place: query[slice(*passes[place])]):
            total[slice(*passes[place])] += read
        return total
