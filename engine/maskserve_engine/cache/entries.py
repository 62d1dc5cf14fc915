"""Entries: cached activations of one template at one anchor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from maskserve_core.contracts.entry_key import Anchor
from maskserve_engine.cache.codec import Coded, encode


@dataclass(frozen=True, slots=True)
class BlockEntry:
    """One block's activations of the image tokens: `h`, or keys and values, or both."""

    hidden: Coded | None = None
    """[tokens, width] at the block's input."""
    keys: Coded | None = None
    """[tokens, width] after norm and rotary embedding."""
    values: Coded | None = None

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in (self.hidden, self.keys, self.values) if c is not None)

    def take(self, index: Tensor) -> BlockEntry:
        """The tokens at `index`, copied."""
        return BlockEntry(*(c and c.take(index) for c in (self.hidden, self.keys, self.values)))


@dataclass(frozen=True, slots=True)
class AnchorEntry:
    """All blocks of a template at one anchor. Never written again once made."""

    anchor: Anchor
    blocks: tuple[BlockEntry, ...]

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def take(self, index: Tensor) -> tuple[BlockEntry, ...]:
        """What a row with these inactive tokens reads, gathered once per anchor."""
        return tuple(block.take(index) for block in self.blocks)


class Recorder:
    """Takes a priming row's activations and makes an entry of them (`forward.Capture`).

    Args:
        kinds: per block, what to keep: any of "h", "kv".
        format: storage format.
    """

    def __init__(self, kinds: Sequence[frozenset[str]], format: str) -> None:
        self.kinds, self.format = kinds, format
        self._hidden: dict[int, Coded] = {}
        self._keys: dict[int, tuple[Coded, Coded]] = {}

    def hidden(self, block: int, hidden: Tensor) -> None:
        if "h" in self.kinds[block]:
            self._hidden[block] = encode(hidden, self.format)

    def keys_values(self, block: int, keys: Tensor, values: Tensor) -> None:
        if "kv" in self.kinds[block]:
            self._keys[block] = (
                encode(keys.flatten(1), self.format),
                encode(values.flatten(1), self.format),
            )

    def entry(self, anchor: Anchor) -> AnchorEntry:
        blocks = []
        for block in range(len(self.kinds)):
            keys, values = self._keys.get(block, (None, None))
            blocks.append(BlockEntry(self._hidden.get(block), keys, values))
        return AnchorEntry(anchor, tuple(blocks))
