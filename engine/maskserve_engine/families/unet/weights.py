"""The weights of the transformer stacks of a UNet2DConditionModel.

Convolutions and norms stay the model's modules. Layers with the same input are joined.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from maskserve_engine.batch.graphs import Graphs
from maskserve_engine.batch.row_updates import ByRow, MovingRows, RowUpdates
from maskserve_engine.layers.linear import Linear, PlainLinear, linear, map_linears
from maskserve_engine.layers.low_rank import (
    Adapters,
    Place,
    is_layer,
    layer_shape,
)


class SelfAttention(NamedTuple):
    qkv: Linear
    """Queries, keys and values, side by side."""
    to_out: Linear
    head_count: int

    @property
    def keys_values(self) -> Linear:
        width = self.qkv.out_features // 3
        return self.qkv.columns(width, 3 * width)


class CrossAttention(NamedTuple):
    to_q: Linear
    keys_values: Linear
    to_out: Linear
    head_count: int


class BlockWeights(NamedTuple):
    norm1: nn.LayerNorm
    attn1: SelfAttention
    norm2: nn.LayerNorm
    attn2: CrossAttention
    norm3: nn.LayerNorm
    up: Linear
    """Input of the feed-forward part, with its gates."""
    down: Linear


class StackWeights(NamedTuple):
    norm: nn.Module
    proj_in: Linear
    transformer_blocks: tuple[BlockWeights, ...]
    proj_out: Linear


Stage = tuple[StackWeights, ...]
"""Stacks of a stage in the order they run; empty where the stage has no attention."""


@dataclass(frozen=True, slots=True)
class UnetWeights:
    model: Any
    """The model, for its convolutions, norms and embeddings."""
    down_blocks: tuple[Stage, ...]
    mid_block: Stage
    up_blocks: tuple[Stage, ...]
    layers: Mapping[nn.Module, Callable[..., Tensor]] = field(default_factory=dict)
    """Replacements of the model's convolutions and timestep projections, for passes with LoRAs."""
    graphs: Graphs | None = None
    updates: RowUpdates | None = None
    """Updates of the passes' LoRAs; None: no pass has any."""

    @classmethod
    def of(cls, model: Any) -> UnetWeights:
        """Join the layers of a UNet, or of a ControlNet, which has no up blocks."""
        with torch.no_grad():
            down = tuple(map(_stage, model.down_blocks))
            up = tuple(map(_stage, getattr(model, "up_blocks", ())))
            return cls(model, down, _stage(model.mid_block), up)

    @property
    def blocks(self) -> int:
        stages = (*self.down_blocks, self.mid_block, *self.up_blocks)
        return sum(len(stack.transformer_blocks) for stage in stages for stack in stage)

    @property
    def attends(self) -> tuple[bool, ...]:
        """Whether each level has attention."""
        *upper, last = map(bool, self.down_blocks)
        return (*upper, last or bool(self.mid_block))

    def with_linears(self, change: Callable[[str, Linear], Linear]) -> UnetWeights:
        """Return the weights with other products (`map_linears`), which receive the passes' spans.

        A place is for example `down_blocks.0.1.transformer_blocks.0.attn1.qkv`: the second stack of
        the first stage.
        """
        return map_linears(self, change)

    def with_adapters(self, passes: Sequence[Adapters]) -> UnetWeights:
        return self._with(RowUpdates(passes, self.model.device)) if any(passes) else self

    def copied(self, copy: Callable[[Tensor], Tensor], moving: Sequence[MovingRows]) -> UnetWeights:
        """Return the weights with copied updates (`RowUpdates.copied`)."""
        return self if self.updates is None else self._with(self.updates.copied(copy, moving))

    def _with(self, updates: RowUpdates) -> UnetWeights:
        layers: dict[nn.Module, Callable[..., Tensor]] = {}
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Conv2d):
                conv = updates.conv(name, module)
                if conv is not None:
                    layers[module] = conv
            elif name.endswith("time_emb_proj") or name.startswith("time_embedding.linear"):
                product = updates.linear(name, linear(module))
                if isinstance(product, ByRow):
                    layers[module] = product
        changed = self.with_linears(updates.linear)
        return replace(changed, layers=layers, updates=updates)


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
    """Return a linear layer; older models have it as an equivalent 1x1 convolution."""
    if isinstance(module, nn.Conv2d):
        return PlainLinear(module.weight.flatten(1), module.bias)
    return linear(module)


def _block(block: Any) -> BlockWeights:
    self_attn, cross = block.attn1, block.attn2
    return BlockWeights(
        block.norm1,
        SelfAttention(
            linear(self_attn.to_q, self_attn.to_k, self_attn.to_v),
            linear(self_attn.to_out[0]),
            self_attn.heads,
        ),
        block.norm2,
        CrossAttention(
            linear(cross.to_q),
            linear(cross.to_k, cross.to_v),
            linear(cross.to_out[0]),
            cross.heads,
        ),
        block.norm3,
        linear(block.ff.net[0].proj),
        linear(block.ff.net[2]),
    )


_OF_STACK = re.compile(r"(?P<stage>(?:down|up)_blocks\.\d+|mid_block)\.attentions\.(?P<rest>.*)")
"""Names of layers in a stack."""
_OF_BLOCK = {
    "attn1.to_q": ("attn1.qkv", 0),
    "attn1.to_k": ("attn1.qkv", 1),
    "attn1.to_v": ("attn1.qkv", 2),
    "attn1.to_out.0": ("attn1.to_out", 0),
    "attn2.to_k": ("attn2.keys_values", 0),
    "attn2.to_v": ("attn2.keys_values", 1),
    "attn2.to_out.0": ("attn2.to_out", 0),
    "ff.net.0.proj": ("up", 0),
    "ff.net.2": ("down", 0),
}
"""Layer of a block → its product, and the number of layers before it in that product."""
_OF_MODEL = re.compile(
    r"conv_(in|out)|.*\.(conv1|conv2|conv_shortcut|time_emb_proj|(down|up)samplers\.0\.conv)"
    r"|(time|add)_embedding\.linear_[12]"
)
"""Names of layers outside the stacks that a LoRA may change."""


def places_of(model: Any) -> dict[str, Place]:
    """Return the places of the layers that a LoRA may change in `UnetWeights`."""
    places = {}
    for name, module in model.named_modules():
        if not is_layer(module):
            continue
        shape, in_stack = layer_shape(module), _OF_STACK.fullmatch(name)
        if in_stack is not None:
            product, row_offset = _product_of(in_stack["rest"])
            places[name] = Place(f"{in_stack['stage']}.{product}", row_offset * shape[0], shape)
        elif _OF_MODEL.fullmatch(name):
            places[name] = Place(name, 0, shape, isinstance(module, nn.Conv2d))
    return places


def _product_of(name: str) -> tuple[str, int]:
    """Map `0.transformer_blocks.1.attn1.to_k` to (`0.transformer_blocks.1.attn1.qkv`, 1)."""
    parts = name.split(".")
    layer = ".".join(parts[3:])
    if not layer:
        return name, 0
    product, row_offset = _OF_BLOCK.get(layer, (layer, 0))
    return ".".join((*parts[:3], product)), row_offset
