"""One stack (Transformer2DModel) of the UNet over computed tokens, with the real model's weights.

GroupNorm, proj_in, proj_out and the residual run on all positions, or on those of a row's tile;
between them the blocks compute active tokens only (design §4, "Cached row"):

    proj_in ► all tokens ─► block ► block ► … ► active tokens ─┐
                     └ inactive: K and V only, or dropped      ├► all tokens ► proj_out
                                     inactive: from the cache ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from maskserve_engine.cache.entries import Recorder
from maskserve_engine.families.unet.levels import Level, Sparse
from maskserve_engine.families.unet.weights import AttentionWeights, BlockWeights, StackWeights
from maskserve_engine.layers.attention import Segments, Span, attention, spans


class InactivePassTokens(Protocol):
    """A cached pass's inactive tokens: what of them the plan's blocks may need.

    Blocks are numbered over the whole UNet, in the order they run.
    """

    def hidden(self, block: int, out: Tensor) -> None:
        """Write their cached hidden states at the block's input into `out` [m, width]."""
        ...

    def keys_values(self, block: int, keys: Tensor, values: Tensor) -> None:
        """Write their cached keys and values into [m, heads, head_dim] each."""
        ...

    def end(self, block: int, out: Tensor, wanted: Tensor | None) -> None:
        """Write their cached hidden states behind a stack's last block into `out` [m, width].

        Args:
            block: the last one.
            out: of those that are wanted.
            wanted: [m] which of the inactive tokens; None: all.
        """
        ...


class Text:
    """The prompts of all passes, packed, and their keys and values in each block.

    These are the same at every step, so each block projects them once for as long as the batch
    holds.

    Args:
        states: [T_i, width] of each pass.
    """

    def __init__(self, states: Sequence[Tensor]) -> None:
        self.states = torch.cat(list(states))
        self.spans = spans([len(each) for each in states])
        """Of each pass."""
        self._projected: dict[int, tuple[Tensor, Tensor]] = {}

    def keys_values(self, number: int, attn: AttentionWeights) -> tuple[Tensor, Tensor]:
        """[T, heads, head_dim] each, for block `number` and its cross-attention."""
        if number not in self._projected:
            self._projected[number] = _keys_values(attn, self.states, self.spans)
        return self._projected[number]


Fill = Callable[[BlockWeights, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Completes a self-attention's computed keys and values by those of the other tokens."""


def transformer_block(
    block: BlockWeights,
    number: int,
    tokens: Tensor,
    own: Segments,
    cross: Segments,
    text: Text,
    fill: Fill | None,
    see: Callable[[Tensor, Tensor], None] | None,
) -> Tensor:
    """A BasicTransformerBlock over packed tokens.

    Args:
        block: its weights.
        number: of the block in the UNet.
        tokens: [n, width] computed tokens.
        own: of self-attention, whose keys are complete.
        cross: of cross-attention.
        text: the passes' prompts.
        fill: None where all tokens are computed.
        see: is shown the computed keys and values; None: nobody is.
    """
    passes = own.q_spans
    normed, attn = block.norm1(tokens), block.attn1
    keys, values = _keys_values(attn, normed, passes)
    if see is not None:
        see(keys, values)
    if fill is not None:
        keys, values = fill(block, keys, values)
    mixed = attention(attn.heads(attn.to_q(normed, passes)), keys, values, own)
    tokens = tokens + attn.to_out(mixed.flatten(1), passes)

    attn = block.attn2
    query = attn.heads(attn.to_q(block.norm2(tokens), passes))
    mixed = attention(query, *text.keys_values(number, attn), cross)
    tokens = tokens + attn.to_out(mixed.flatten(1), passes)

    hidden, gates = block.up(block.norm3(tokens), passes).chunk(2, dim=1)
    return tokens + block.down(hidden * F.gelu(gates), passes)


def _keys_values(
    attn: AttentionWeights, x: Tensor, passes: Sequence[Span]
) -> tuple[Tensor, Tensor]:
    """[n, heads, head_dim] each of tokens [n, width]."""
    return attn.heads(attn.to_k(x, passes)), attn.heads(attn.to_v(x, passes))


class Stack:
    """One run through a stack.

    Args:
        level: of the stack.
        text: the passes' prompts.
        rests: per pass; None where it computes all tokens.
        captures: (first pass, behind its last pass, capture) of each priming row.
        kinds: per block of the UNet, for passes with a rest.
    """

    def __init__(
        self,
        level: Level,
        text: Text,
        rests: Sequence[InactivePassTokens | None],
        captures: Sequence[tuple[int, int, Recorder]],
        kinds: Sequence[str],
    ) -> None:
        self.level, self.text, self.rests = level, text, rests
        self.captures, self.kinds = captures, kinds
        self.sparse: Sparse | None = None  # while inactive tokens are left out
        self.left: Tensor | None = None  # the inactive tokens at the next block's input, at hand

    def run(
        self,
        weights: StackWeights,
        first: int,
        x: Sequence[Tensor],
        normed: Iterable[Tensor],
        passes: Sequence[slice],
    ) -> list[Tensor]:
        """The stack whose first block has the number `first`.

        Args:
            weights: its own.
            first: number of a block in the UNet.
            x: [p, C, h, w] of some passes each.
            normed: the same behind the stack's norm.
            passes: which ones.
        """
        at = [self._spans(each, own) for each, own in zip(x, passes, strict=True)]
        parts = [
            weights.proj_in(each.permute(0, 2, 3, 1).flatten(0, 2), own)
            for each, own in zip(normed, at, strict=True)
        ]
        tokens = parts[0] if len(parts) == 1 else torch.cat(parts)
        for number, block in enumerate(weights.transformer_blocks, start=first):
            tokens = self._block(block, number, tokens)
        tokens = self._end(number, tokens)
        out = []
        for each, own, part in zip(x, at, tokens.split([len(part) for part in parts]), strict=True):
            back = weights.proj_out(part, own).unflatten(0, (each.shape[0], *each.shape[2:]))
            out.append(each + back.permute(0, 3, 1, 2))
        return out

    def _spans(self, x: Tensor, passes: slice) -> tuple[Span, ...]:
        """Of every pass, where it lies among the tokens of these alone; the others are empty."""
        lengths = [0] * len(self.rests)
        lengths[passes] = [x.shape[2] * x.shape[3]] * len(x)
        return spans(lengths)

    def _block(self, block: BlockWeights, number: int, tokens: Tensor) -> Tensor:
        fill = None
        if self.level.sparse is not None:
            tokens = self._widen_or_narrow(number, tokens)
            fill = self._fill(number)
        see = self._capture(number, tokens) if self.captures else None
        at = self.sparse or self.level
        tokens = transformer_block(block, number, tokens, at.own, at.cross, self.text, fill, see)
        self.left = None  # the inactive tokens are a block behind now
        return tokens

    def _widen_or_narrow(self, number: int, tokens: Tensor) -> Tensor:
        """Bring the inactive tokens in or leave them out, as the block's kind asks."""
        dense = self.kinds[number] == "dense"
        assert not self.level.tiled or self.kinds[number] == "kv", "tiles go with `kv` alone"
        if dense and self.sparse is not None:
            rest = self._inactive(number, tokens)
            tokens, self.sparse = self.sparse.there.join(tokens, rest), None
        elif not dense and self.sparse is None:
            self.sparse = self.level.sparse
            assert self.sparse is not None
            # What was computed is nearer to the edit than an entry, and loads nothing.
            tokens, self.left = self.sparse.there.split(tokens)
        return tokens

    def _inactive(self, number: int, like: Tensor) -> Tensor:
        """[m, width] the inactive tokens at the block's input: at hand, or restored."""
        if self.left is not None:
            return self.left
        return self._restored(like, lambda rest, out: rest.hidden(number, out))

    def _restored(self, like: Tensor, read: Callable[[InactivePassTokens, Tensor], None]) -> Tensor:
        assert self.sparse is not None
        out = like.new_empty(len(self.sparse.keys.rest), like.shape[1])
        for rest, (begin, end) in zip(self.rests, self.sparse.keys.rest_spans, strict=True):
            if rest is not None:
                read(rest, out[begin:end])
        return out

    def _restored_ends(self, number: int, like: Tensor) -> Tensor:
        """[m, width] the inactive tokens that are there, behind the stack's last block."""
        assert self.sparse is not None
        there = self.sparse.there
        out = like.new_empty(len(there.rest), like.shape[1])
        for rest, (begin, end), wanted in zip(
            self.rests, there.rest_spans, self.sparse.wanted, strict=True
        ):
            if rest is not None:
                rest.end(number, out[begin:end], wanted)
        return out

    def _fill(self, number: int) -> Fill | None:
        if self.sparse is None:
            return None
        sparse, project = self.sparse, self.kinds[number] == "project"

        def fill(block: BlockWeights, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            if project:
                normed = block.norm1(self._inactive(number, keys.flatten(1)))
                more = _keys_values(block.attn1, normed, sparse.keys.rest_spans)
            else:
                more = self._loaded(number, keys)
            return sparse.keys.join(keys, more[0]), sparse.keys.join(values, more[1])

        return fill

    def _loaded(self, number: int, like: Tensor) -> tuple[Tensor, Tensor]:
        assert self.sparse is not None
        shape = (len(self.sparse.keys.rest), *like.shape[1:])
        keys, values = like.new_empty(shape), like.new_empty(shape)
        for rest, (begin, end) in zip(self.rests, self.sparse.keys.rest_spans, strict=True):
            if rest is not None:
                rest.keys_values(number, keys[begin:end], values[begin:end])
        return keys, values

    def _capture(self, number: int, tokens: Tensor) -> Callable[[Tensor, Tensor], None]:
        """Hand the priming rows' hidden states over now, their keys and values when known."""
        own = self._own_parts()
        for capture, at in own:
            capture.hidden(number, tokens[at])

        def see(keys: Tensor, values: Tensor) -> None:
            for capture, at in own:
                capture.keys_values(number, keys[at], values[at])

        return see

    def _own_parts(self) -> list[tuple[Recorder, slice]]:
        """Where each priming row lies among the computed tokens."""
        spans = (self.sparse or self.level).own.q_spans
        return [
            (capture, slice(spans[first][0], spans[behind - 1][1]))
            for first, behind, capture in self.captures
        ]

    def _end(self, number: int, tokens: Tensor) -> Tensor:
        """All tokens behind the stack's last block `number`."""
        for capture, at in self._own_parts():
            capture.end(number, tokens[at])
        if self.sparse is None:
            return tokens
        return self.sparse.there.join(tokens, self._restored_ends(number, tokens))
