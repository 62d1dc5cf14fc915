"""One stack (Transformer2DModel) of the UNet over computed tokens, with the real model's weights.

GroupNorm, proj_in, proj_out and the residual run on all positions, or on those of a row's tile;
between them the blocks run on computed tokens only (design §4, "Cached row"):

    proj_in ► all tokens ─► block ► block ► … ► computed tokens ─┐
                     └ cached: K and V only, or dropped          ├► all tokens ► proj_out
                                       cached: from the cache ───┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from maskserve_engine.batch.packing import Capture
from maskserve_engine.batch.picture_tokens import PictureKeys, PictureTokens
from maskserve_engine.batch.transfer import copy_tensors
from maskserve_engine.families.unet.levels import Level, Sparse
from maskserve_engine.families.unet.weights import BlockWeights, CrossAttention, StackWeights
from maskserve_engine.layers.add_norm import add_norm
from maskserve_engine.layers.attention import Span, attention, spans
from maskserve_engine.layers.geglu import geglu
from maskserve_engine.layers.scatter_kv import KvSource

Shown = Literal["hidden", "keys_values", "end", "map"]
"""A method of `StackCapture`."""


class Show(Protocol):
    """Shows tokens of all passes to the passes' captures."""

    def __call__(self, part: Shown, block: int, x: Tensor, passes: Sequence[Span]) -> None:
        """Show `x`: [n, width], or keys and values [n, 2, heads, head_dim].

        Args:
            part: the method that receives it.
            block: number of the block in the UNet.
            x: tokens packed at `passes`.
            passes: span of each pass.
        """
        ...


class PlaceInactive(Protocol):
    """Places the cached tokens of all passes."""

    def __call__(self, number: int, part: str, outs: Sequence[Tensor]) -> None:
        """Write the cached part of a block to its tokens' slots in `outs`.

        Args:
            number: number of the block in the UNet.
            part: `kv`, into keys and values; `h` or `end`, into hidden states of all tokens; `h
                alone`, of the cached ones only.
            outs: a buffer for each tensor of the part.
        """
        ...


class InactivePassTokens(Protocol):
    """A cached pass's cached tokens, with the parts that the plan's blocks may read.

    Blocks are numbered over the whole UNet, in the order they run.
    """

    def source(self, block: int, part: str, positions: Tensor | None = None) -> KvSource:
        """Return where a cached part lies.

        Args:
            block: number of the block in the UNet.
            part: `h`, hidden states at the block's input; `kv`, keys and values; `end`, hidden
                states after a stack's last block.
            positions: [m] indices among the cached tokens; None: all.
        """
        ...


class StackCapture(Capture, Protocol):
    """Also receives the stacks' outputs, and the feature maps between stacks."""

    @property
    def parts(self) -> frozenset[Shown]:
        """The methods that keep something."""
        ...

    def end(self, block: int, output: Tensor, /) -> None:
        """Receive [tokens, width] after the stack that ends with `block`; only valid during the
        call.
        """
        ...

    def map(self, number: int, x: Tensor, groups: int, /) -> None:
        """Receive [passes, C, h, w] of map `number`, which a norm of `groups` or a strided
        convolution reads; only valid during the call.
        """
        ...


class Text:
    """The prompts of all passes, packed, with their keys and values in each block.

    These are the same at every step, so each block projects them once per batch.
    """

    def __init__(self, states: Sequence[Tensor], pictures: Sequence[PictureKeys] = ()) -> None:
        """Pack prompts' [T, width], and beside them the IP-Adapters' pictures."""
        self.pictures = PictureTokens.of(pictures)
        self.states = torch.cat(list(states))
        self.spans = spans([len(states_of_pass) for states_of_pass in states])
        self._projected: dict[int, Tensor] = {}
        """[T, 2, heads, head_dim] by number of the block."""
        self._layers: dict[int, CrossAttention] = {}

    def keys_values(self, number: int, attn: CrossAttention) -> tuple[Tensor, Tensor]:
        """Return [T, heads, head_dim] each, for block `number`."""
        self._layers.setdefault(number, attn)
        if number not in self._projected:
            self._projected[number] = self._project(number, self)
        keys, values = self._projected[number].unbind(1)
        return keys, values

    def copied(self, copy_of: Callable[[Tensor], Tensor]) -> Text:
        clone = copy(self)
        clone._layers = {}  # those of a recorded step's own weights
        clone._projected = {
            number: copy_of(projected) for number, projected in self._projected.items()
        }
        return clone

    def take(self, other: Text) -> None:
        """Copy the keys and values of other prompts of the same lengths, projected once."""
        for number in self._projected:
            if number not in other._projected:
                other._projected[number] = self._project(number, other)
        copy_tensors(
            self._projected, {number: other._projected[number] for number in self._projected}
        )

    def _project(self, number: int, of: Text) -> Tensor:
        attn = self._layers[number]
        return _heads(attn.keys_values(of.states, of.spans), 2, attn.head_count)


Empty = Callable[[Tensor, tuple[int, ...]], Tensor]
Fill = Callable[[BlockWeights, Tensor], tuple[Tensor, Tensor]]
"""Returns all keys and values of a self-attention, from the computed ones [n, 2, heads,
head_dim]."""


def transformer_block(
    block: BlockWeights,
    number: int,
    tokens: Tensor,
    at: Level | Sparse,
    text: Text,
    fill: Fill | None,
    see: Callable[[Tensor], None],
) -> Tensor:
    """Run a BasicTransformerBlock over packed tokens.

    Args:
        block: weights of the block.
        number: number of the block in the UNet.
        tokens: [n, width] computed tokens.
        at: the passes' segments of self-attention, with all keys, and of cross-attention.
        text: prompts of the passes.
        fill: adds cached keys and values; None: all tokens are computed.
        see: receives the computed keys and values, [n, 2, heads, head_dim].
    """
    passes, attn = at.passes, block.attn1
    qkv = _heads(attn.qkv(block.norm1(tokens), passes), 3, attn.head_count)
    query, keys, values = qkv.unbind(1)
    see(qkv[:, 1:])
    if fill is not None:
        keys, values = fill(block, qkv[:, 1:])
    mixed = attention(query, keys, values, at.segments)
    del qkv, query, keys, values
    tokens, normed = add_norm(tokens, attn.to_out(mixed.flatten(1), passes), block.norm2)

    to_text = block.attn2
    query = to_text.to_q(normed, passes).unflatten(1, (to_text.head_count, -1))
    mixed = attention(query, *text.keys_values(number, to_text), at.cross)
    if text.pictures is not None:
        mixed = text.pictures.added(number, query, mixed, passes)
    tokens, normed = add_norm(tokens, to_text.to_out(mixed.flatten(1), passes), block.norm3)

    return tokens + block.down(geglu(block.up(normed, passes)), passes)


def _heads(x: Tensor, parts: int, heads: int) -> Tensor:
    """Reshape [n, parts · width] to [n, parts, heads, head_dim]."""
    return x.unflatten(1, (parts, heads, -1))


class Stack:
    def __init__(
        self,
        level: Level,
        text: Text,
        kinds: Sequence[str],
        place: PlaceInactive,
        show: Show,
        empty: Empty,
    ) -> None:
        self.level, self.text, self.kinds = level, text, kinds
        self.place, self.show, self.empty = place, show, empty
        self.sparse: Sparse | None = None  # while cached tokens are left out
        self.left: Tensor | None = None  # cached tokens at the next block's input, if computed

    def run(
        self,
        weights: StackWeights,
        first: int,
        x: Sequence[Tensor],
        normed: Iterable[Tensor],
        passes: Sequence[slice],
    ) -> list[Tensor]:
        """Run the stack on [p, C, h, w] maps by canvas; `first` numbers its first block in the
        UNet.
        """
        at = [
            self._spans(feature_map, pass_slice)
            for feature_map, pass_slice in zip(x, passes, strict=True)
        ]
        parts = [
            weights.proj_in(feature_map.permute(0, 2, 3, 1).flatten(0, 2), pass_slice)
            for feature_map, pass_slice in zip(normed, at, strict=True)
        ]
        tokens = parts[0] if len(parts) == 1 else torch.cat(parts)
        for number, block in enumerate(weights.transformer_blocks, start=first):
            tokens = self._block(block, number, tokens)
        tokens = self._end(number, tokens)
        out = []
        for feature_map, pass_slice, part in zip(
            x, at, tokens.split([len(part) for part in parts]), strict=True
        ):
            back = weights.proj_out(part, pass_slice).unflatten(
                0, (feature_map.shape[0], *feature_map.shape[2:])
            )
            out.append(feature_map + back.permute(0, 3, 1, 2))
        return out

    def _spans(self, x: Tensor, passes: slice) -> tuple[Span, ...]:
        """Return the span of every pass among the tokens of `passes`; empty for others."""
        lengths = [0] * len(self.text.spans)
        lengths[passes] = [x.shape[2] * x.shape[3]] * len(x)
        return spans(lengths)

    def _block(self, block: BlockWeights, number: int, tokens: Tensor) -> Tensor:
        fill = None
        if self.level.sparse is not None:
            tokens = self._widen_or_narrow(number, tokens)
            fill = self._fill(number)
        at = self.sparse or self.level
        self.show("hidden", number, tokens, at.passes)

        def see(keys_values: Tensor) -> None:
            self.show("keys_values", number, keys_values, at.passes)

        tokens = transformer_block(block, number, tokens, at, self.text, fill, see)
        self.left = None  # the cached tokens lag one block now
        return tokens

    def _widen_or_narrow(self, number: int, tokens: Tensor) -> Tensor:
        """Add or drop the cached tokens, as the block's kind requires."""
        dense = self.kinds[number] == "dense"
        assert not self.level.tiled or self.kinds[number] == "kv", "tiles go with `kv` alone"
        if dense and self.sparse is not None:
            tokens, self.sparse = self._restored(number, "h", tokens), None
        elif not dense and self.sparse is None:
            self.sparse = self.level.sparse
            assert self.sparse is not None
            # Computed hidden states are nearer to the edit than an entry, and need no load.
            feature_tokens, all_tokens = self.sparse.computed, tokens
            tokens = all_tokens.index_select(0, feature_tokens.core)
            if self.kinds[number] == "project":
                self.left = all_tokens.index_select(0, feature_tokens.cached)
        return tokens

    def _inactive(self, number: int, width: int, like: Tensor) -> Tensor:
        """Return [m, width] hidden states of the cached tokens at the block's input."""
        if self.left is not None:
            return self.left
        assert self.sparse is not None
        out = like.new_empty(len(self.sparse.keys.cached.to), width)
        self.place(number, "h alone", (out,))
        return out

    def _restored(self, number: int, part: str, core: Tensor) -> Tensor:
        """Return [n + m, width] hidden states of all tokens, from the computed ones and the
        cache.
        """
        assert self.sparse is not None
        feature_tokens = self.sparse.computed
        # With a tile these are fewer than the level's tokens. Recorded steps of all tiles take the
        # same memory.
        room = self.empty(core, (self.sparse.keys.count, core.shape[1]))
        all_hidden = room[: feature_tokens.count]
        all_hidden.index_copy_(0, feature_tokens.core, core)
        self.place(number, part, (all_hidden,))
        return all_hidden

    def _fill(self, number: int) -> Fill | None:
        if self.sparse is None:
            return None
        return partial(self._project if self.kinds[number] == "project" else self._load, number)

    def _load(self, number: int, block: BlockWeights, computed: Tensor) -> tuple[Tensor, Tensor]:
        keys_values = self._all_keys(computed)
        keys, values = keys_values.unbind()
        self.place(number, "kv", (keys, values))
        return keys, values

    def _project(self, number: int, block: BlockWeights, computed: Tensor) -> tuple[Tensor, Tensor]:
        assert self.sparse is not None
        keys, keys_values = self.sparse.keys, self._all_keys(computed)
        hidden = self._inactive(number, keys_values[0, 0].numel(), computed)
        product = block.attn1.keys_values(block.norm1(hidden), keys.cached.spans)
        cached_keys_values = _heads(product, 2, block.attn1.head_count)
        keys_values.index_copy_(1, keys.slots.to, cached_keys_values.transpose(0, 1))
        return keys_values[0], keys_values[1]

    def _all_keys(self, computed: Tensor) -> Tensor:
        """Return [2, keys, heads, head_dim] of all tokens, with only the computed ones written."""
        assert self.sparse is not None
        keys = self.sparse.keys
        keys_values = self.empty(computed, (2, keys.count, *computed.shape[2:]))
        return keys_values.index_copy_(1, keys.core, computed.transpose(0, 1))

    def _end(self, number: int, tokens: Tensor) -> Tensor:
        self.show("end", number, tokens, (self.sparse or self.level).passes)
        if self.sparse is None:
            return tokens
        return self._restored(number, "end", tokens)
