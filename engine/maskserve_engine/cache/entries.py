"""Entries: cached activations of one template at one anchor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from maskserve_core.contracts.entry_key import Anchor
from maskserve_engine.cache.codec import Coded, encode

PARTS = ("h", "kv", "end", "map")
"""What a block may keep: hidden states at its input, keys and values, its stack's output; and what
is kept behind the blocks, a feature map of a UNet.
"""


@dataclass(frozen=True, slots=True)
class BlockEntry:
    """One block's activations of the image tokens of its level.

    A model that runs twice per step (classifier-free guidance) keeps both halves, one behind the
    other: `tokens` is then twice the level's.
    """

    hidden: Coded | None = None
    """[tokens, width] at the block's input: part `h`."""
    keys: Coded | None = None
    """[tokens, width] after norm and rotary embedding: part `kv`, with the values."""
    values: Coded | None = None
    end: Coded | None = None
    """[tokens, width] at the block's output: part `end`, where a UNet's stack ends."""
    map: Coded | None = None
    """[tokens, width] of a feature map's positions: part `map`; no block has any."""

    @property
    def nbytes(self) -> int:
        return sum(coded.nbytes for part in PARTS for coded in self.part(part))

    def part(self, name: str) -> tuple[Coded, ...]:
        """The tensors of one of PARTS; none where it is not kept."""
        if name == "kv":
            return () if self.keys is None or self.values is None else (self.keys, self.values)
        one = {"h": self.hidden, "end": self.end, "map": self.map}[name]
        return () if one is None else (one,)

    def each(self, change: Callable[[Coded], Coded]) -> BlockEntry:
        """The same with every tensor changed."""
        own = (self.hidden, self.keys, self.values, self.end, self.map)
        return BlockEntry(*(coded and change(coded) for coded in own))


@dataclass(frozen=True, slots=True)
class AnchorEntry:
    """All blocks of a template at one anchor. Never written again once made."""

    anchor: Anchor
    blocks: tuple[BlockEntry, ...]
    """In the order they run. Behind them, where they are kept: the feature maps, in the order they
    are read, and last the means and variances of all maps' groups."""

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    @property
    def broken(self) -> bool:
        """Whether it can no longer be read, as may become of a file."""
        return False


class Recorder:
    """Takes a priming row's activations and makes an entry of them.

    What it is given may be views: it keeps encoded copies.

    Args:
        kinds: per block, what to keep: any of "h", "kv". Ends are kept wherever they are told.
        format: storage format.
        maps: feature maps that are kept.
    """

    def __init__(self, kinds: Sequence[frozenset[str]], format: str, maps: int = 0) -> None:
        self.kinds, self.format, self.maps = kinds, format, maps
        self._hidden: dict[int, Coded] = {}
        self._keys: dict[int, tuple[Coded, Coded]] = {}
        self._ends: dict[int, Coded] = {}
        self._maps: list[Coded] = []
        self._moments: list[Tensor] = []

    def hidden(self, block: int, hidden: Tensor) -> None:
        """`hidden` [tokens, width]: image tokens at the block's input."""
        if "h" in self.kinds[block]:
            self._hidden[block] = encode(hidden, self.format)

    def keys_values(self, block: int, keys: Tensor, values: Tensor) -> None:
        """`keys` and `values` [tokens, heads, head_dim] of the image tokens."""
        if "kv" in self.kinds[block]:
            self._keys[block] = (
                encode(keys.flatten(1), self.format),
                encode(values.flatten(1), self.format),
            )

    def end(self, block: int, output: Tensor) -> None:
        """`output` [tokens, width]: what the stack that ends with `block` hands on."""
        self._ends[block] = encode(output, self.format)

    def map(self, positions: Tensor) -> Tensor:
        """Keep the next feature map `positions` [n, width]; returns it as it will be read."""
        self._maps.append(encode(positions, self.format))
        stored = torch.empty_like(positions)
        self._maps[-1].into(stored)
        return stored

    def moments(self, moments: Tensor) -> None:
        """`moments` [halves, 2 · groups] of the map just kept: means, then variances."""
        self._moments.append(moments)

    def entry(self, anchor: Anchor) -> AnchorEntry:
        blocks = []
        for block in range(len(self.kinds)):
            keys, values = self._keys.get(block, (None, None))
            blocks.append(BlockEntry(self._hidden.get(block), keys, values, self._ends.get(block)))
        assert len(self._maps) == len(self._moments) == self.maps
        if self.maps:
            blocks += [BlockEntry(map=each) for each in self._maps]
            blocks.append(BlockEntry(map=encode(torch.cat(self._moments), "model")))
        return AnchorEntry(anchor, tuple(blocks))
