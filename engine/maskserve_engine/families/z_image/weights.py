"""The weights of a ZImageTransformer2DModel, joined where one product replaces several; the model's
own parameters become parts of the joined tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maskserve_engine.batch.graphs import Graphs
from maskserve_engine.batch.row_updates import RowUpdates, RowWeights
from maskserve_engine.families.mmdit.weights import TwoLayers, block_norms, places_in
from maskserve_engine.layers.linear import Linear, linear
from maskserve_engine.layers.low_rank import Place

_SORT = "2-1"
"""Key of the embedders and last layers for pictures: side and frames of a patch."""
OPENING = (
    f"all_x_embedder.{_SORT}",
    "t_embedder.mlp",
    "noise_refiner",
    f"all_final_layer.{_SORT}.adaLN_modulation.1",
)
"""Modules that run before the text is seen, and the last vectors, which come with the first."""


class ZImageBlock(NamedTuple):
    vectors: Linear | None
    """From the time's embedding: scale and gate of attention, and of the feed-forward part. None: a
    text-only block, without time."""
    qkv: Linear
    heads: Tensor
    """[2, 1, head_dim] norms of queries and keys, float32."""
    out: Linear
    up: Linear
    down: Linear
    norms: tuple[Tensor, Tensor, Tensor, Tensor]
    """[width] each: before and after attention, before and after the feed-forward part."""


@dataclass(frozen=True)
class ZImageWeights(RowWeights):
    x_embedder: Linear
    time_embedder: TwoLayers
    context_norm: Tensor
    """[in] norm of a prompt's states."""
    context_embedder: Linear
    context_blocks: tuple[ZImageBlock, ...]
    """Blocks of a prompt's tokens only, which are computed once."""
    image_blocks: tuple[ZImageBlock, ...]
    """Blocks of the picture's tokens only."""
    joint_blocks: tuple[ZImageBlock, ...]
    last_vectors: Linear
    proj_out: Linear
    text_pad: Tensor
    """[1, width] pad token of prompts."""
    image_pad: Tensor
    """[1, width] pad token of pictures."""
    epsilon: float
    head_epsilon: float
    head_dim: int
    device: torch.device
    dtype: torch.dtype
    placed_bytes: int = 0
    """Bytes that a batch's keys and values may take, over all blocks, to stay placed
    (`PlacedKV`)."""
    graphs: Graphs | None = None
    """None: steps are not recorded."""
    updates: RowUpdates | None = None

    @classmethod
    def of(cls, model: Any, placed_bytes: int = 0) -> ZImageWeights:
        """Build from a ZImageTransformer2DModel."""
        last, words, time = model.all_final_layer[_SORT], model.cap_embedder, model.t_embedder.mlp
        stacks = (model.context_refiner, model.noise_refiner, model.layers)
        with torch.no_grad():
            context, image, joint = (tuple(block_of(block) for block in stack) for stack in stacks)
            return cls(
                linear(model.all_x_embedder[_SORT]),
                TwoLayers(linear(time[0]), linear(time[2])),
                words[0].weight,
                linear(words[1]),
                context,
                image,
                joint,
                linear(last.adaLN_modulation[1]),
                linear(last.linear),
                model.cap_pad_token,
                model.x_pad_token,
                float(model.config.norm_eps),
                float(model.layers[0].attention.norm_q.eps),
                model.layers[0].head_dim,
                model.device,
                model.dtype,
                placed_bytes,
            )

    def with_opening(self, modules: Mapping[str, Any]) -> ZImageWeights:
        """Return the weights with those that run before the text is seen from `OPENING`'s
        modules.
        """
        embed, time, picture, last = (modules[name] for name in OPENING)
        with torch.no_grad():
            return replace(
                self,
                x_embedder=linear(embed),
                time_embedder=TwoLayers(linear(time[0]), linear(time[2])),
                image_blocks=tuple([block_of(block) for block in picture]),
                last_vectors=linear(last),
                device=embed.weight.device,
            )

    @cached_property
    def blocks(self) -> tuple[ZImageBlock, ...]:
        return (*self.image_blocks, *self.joint_blocks)

    @property
    def width(self) -> int:
        return self.x_embedder.out_features


def block_of(block: Any) -> ZImageBlock:
    attn, ff = block.attention, block.feed_forward
    return ZImageBlock(
        linear(block.adaLN_modulation[0]) if block.modulation else None,
        linear(attn.to_q, attn.to_k, attn.to_v),
        block_norms(attn.norm_q, attn.norm_k),
        linear(attn.to_out[0]),
        linear(ff.w1, ff.w3),
        linear(ff.w2),
        (
            block.attention_norm1.weight,
            block.attention_norm2.weight,
            block.ffn_norm1.weight,
            block.ffn_norm2.weight,
        ),
    )


_OF_BLOCK = {
    "adaLN_modulation.0": ("vectors", 0),
    "attention.to_q": ("qkv", 0),
    "attention.to_k": ("qkv", 1),
    "attention.to_v": ("qkv", 2),
    "attention.to_out.0": ("out", 0),
    "feed_forward.w1": ("up", 0),
    "feed_forward.w2": ("down", 0),
}
"""Layer of a block → its product, and its offset in the product's outputs, in widths of the
model."""
_STACKS = {
    "context_refiner": "context_blocks",
    "noise_refiner": "image_blocks",
    "layers": "joint_blocks",
}
_OUTSIDE = {
    f"all_x_embedder.{_SORT}": "x_embedder",
    f"all_final_layer.{_SORT}.adaLN_modulation.1": "last_vectors",
    f"all_final_layer.{_SORT}.linear": "proj_out",
    "cap_embedder.1": "context_embedder",
    "t_embedder.mlp.0": "time_embedder.linear_1",
    "t_embedder.mlp.2": "time_embedder.linear_2",
}


def places_of(model: Any) -> dict[str, Place]:
    stacks = {name: (stack_name, _OF_BLOCK) for name, stack_name in _STACKS.items()}
    places = places_in(model, model.dim, stacks, _OUTSIDE)
    # Their outputs are no multiple of the model's width.
    first = {name: place for name, place in places.items() if name.endswith("feed_forward.w1")}
    for name, place in first.items():
        third = name.replace("w1", "w3")
        places[third] = place._replace(begin=place.shape[0])
    return places
