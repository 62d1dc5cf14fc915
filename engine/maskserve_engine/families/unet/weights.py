"""The weights of the transformer stacks of a UNet2DConditionModel, found once.

Convolutions and norms stay the model's modules. Nothing is joined, so each product is one layer
of the model, as files of adapters name them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from maskserve_engine.layers.linear import Linear, PlainLinear, linear, map_linears


class AttentionWeights(NamedTuple):
    """A self-attention, or a cross-attention, whose keys and values are the prompt's."""

    to_q: Linear
    to_k: Linear
    to_v: Linear
    to_out: Linear
    head_count: int

    def heads(self, x: Tensor) -> Tensor:
        """[n, heads, head_dim] of [n, width]."""
        return x.unflatten(1, (self.head_count, -1))


class BlockWeights(NamedTuple):
    """A BasicTransformerBlock."""

    norm1: nn.Module
    attn1: AttentionWeights
    """To all tokens."""
    norm2: nn.Module
    attn2: AttentionWeights
    """To the prompt."""
    norm3: nn.Module
    up: Linear
    """The feed-forward part's input, and the gates beside it."""
    down: Linear


class StackWeights(NamedTuple):
    """A Transformer2DModel."""

    norm: nn.Module
    proj_in: Linear
    transformer_blocks: tuple[BlockWeights, ...]
    proj_out: Linear


Stage = tuple[StackWeights, ...]
"""Stacks of a stage in the order they run; none where the stage does not attend."""


@dataclass(frozen=True, slots=True)
class UnetWeights:
    """All of a UNet2DConditionModel that a step needs."""

    model: Any
    """For its convolutions, norms and embeddings."""
    down_blocks: tuple[Stage, ...]
    mid_block: Stage
    up_blocks: tuple[Stage, ...]

    @classmethod
    def of(cls, model: Any) -> UnetWeights:
        with torch.no_grad():
            down, up = (tuple(map(_stage, each)) for each in (model.down_blocks, model.up_blocks))
            return cls(model, down, _stage(model.mid_block), up)

    def with_linears(self, change: Callable[[str, Linear], Linear]) -> UnetWeights:
        """The same with other products (`map_linears`), which are given the passes' spans.

        A place is `down_blocks.0.1.transformer_blocks.0.attn1.to_q`, say: of the first stage the
        second stack.
        """
        return map_linears(self, change)


def _stage(stage: Any) -> Stage:
    return tuple(
        StackWeights(
            stack.norm,
            _projection(stack.proj_in),
            tuple(map(_block, stack.transformer_blocks)),
            _projection(stack.proj_out),
        )
        for stack in getattr(stage, "attentions", None) or ()
    )


def _projection(module: Any) -> Linear:
    """A product of tokens; older models have it as a 1x1 convolution, which is the same."""
    if isinstance(module, nn.Conv2d):
        return PlainLinear(module.weight.flatten(1), module.bias)
    return linear(module)


def _block(block: Any) -> BlockWeights:
    return BlockWeights(
        block.norm1,
        _attention(block.attn1),
        block.norm2,
        _attention(block.attn2),
        block.norm3,
        linear(block.ff.net[0].proj),
        linear(block.ff.net[2]),
    )


def _attention(attn: Any) -> AttentionWeights:
    products = linear(attn.to_q), linear(attn.to_k), linear(attn.to_v), linear(attn.to_out[0])
    return AttentionWeights(*products, attn.heads)
