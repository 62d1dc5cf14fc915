"""The weights of a FluxTransformer2DModel, found once and joined where one product serves several.

The model's own parameters become parts of the joined ones: nothing is held twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from maskserve_engine.batch.packing import Packing
from maskserve_engine.layers.linear import Linear, all_plain, linear, map_linears


class StreamWeights(NamedTuple):
    """What one stream of a double block has for itself."""

    vectors: Linear
    """From the time-text embedding: shift, scale, gate and the same of the feed-forward part."""
    qkv: Linear
    out: Linear
    up: Linear
    down: Linear


class Double(NamedTuple):
    """A FluxTransformerBlock."""

    image: StreamWeights
    text: StreamWeights
    norms: Tensor
    """[2, 2, 1, head_dim] of text and image, of queries and keys, float32."""


class Single(NamedTuple):
    """A FluxSingleTransformerBlock."""

    vectors: Linear
    """From the time-text embedding: shift, scale and gate."""
    qkv_up: Linear
    """Queries, keys, values and the feed-forward part's input."""
    norms: Tensor
    """[2, 1, head_dim] of queries and keys, float32."""
    out: Linear


class Segments(Protocol):
    """What is before and after attention in a block, made in another way than `blocks` has it."""

    def before_double(
        self,
        block: Double,
        text: Tensor,
        image: Tensor,
        vectors: tuple[Tensor, Tensor],
        packing: Packing,
        cis: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Rotated queries and keys [N, 2, heads, head_dim], values [N, heads, head_dim], in row
        order.
        """
        ...

    def after_double(
        self,
        block: Double,
        text: Tensor,
        image: Tensor,
        attended: Tensor,
        vectors: tuple[Tensor, Tensor],
        packing: Packing,
    ) -> tuple[Tensor, Tensor]:
        """The text and image streams."""
        ...

    def before_single(
        self, block: Single, x: Tensor, vectors: Tensor, packing: Packing, cis: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `before_double`, and the feed-forward part."""
        ...

    def after_single(
        self,
        block: Single,
        x: Tensor,
        attended: Tensor,
        up: Tensor,
        vectors: Tensor,
        packing: Packing,
    ) -> Tensor:
        """[N, width] in row order."""
        ...


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a FluxTransformer2DModel that a step needs."""

    x_embedder: Linear
    time_text_embed: Any
    double_blocks: tuple[Double, ...]
    single_blocks: tuple[Single, ...]
    last_vectors: Linear
    proj_out: Linear
    head_dim: int
    device: torch.device
    dtype: torch.dtype
    segments: Segments | None = None
    """Of the blocks, compiled; None: they run as `blocks` has them."""
    resident_bytes: int = 0
    """That all blocks' keys and values of a batch may take to stay in place (`ResidentKV`)."""

    @classmethod
    def of(cls, model: Any) -> Weights:
        doubles, singles = model.transformer_blocks, model.single_transformer_blocks
        with torch.no_grad():
            return cls(
                linear(model.x_embedder),
                model.time_text_embed,
                tuple(_double(block) for block in doubles),
                tuple(_single(block) for block in singles),
                linear(model.norm_out.linear),
                linear(model.proj_out),
                (singles or doubles)[0].attn.head_dim,
                model.device,
                model.dtype,
            )

    @property
    def blocks(self) -> tuple[Double | Single, ...]:
        return (*self.double_blocks, *self.single_blocks)

    @property
    def width(self) -> int:
        return self.x_embedder.out_features

    @property
    def plain(self) -> bool:
        """Whether all products of blocks are plain, so that their segments can be compiled."""
        return all_plain(self.blocks)

    def with_linears(self, change: Callable[[str, Linear], Linear]) -> Weights:
        """The same with other products (`map_linears`); those of a block run uncompiled where they
        are not plain.
        """
        changed = map_linears(self, change)
        return changed if changed.plain else replace(changed, segments=None)


def _norms(*norms: Any) -> Tensor:
    return torch.stack([norm.weight for norm in norms])[:, None].float()


def _double(block: Any) -> Double:
    attn = block.attn
    image = StreamWeights(
        linear(block.norm1.linear),
        linear(attn.to_q, attn.to_k, attn.to_v),
        linear(attn.to_out[0]),
        linear(block.ff.net[0].proj),
        linear(block.ff.net[2]),
    )
    text = StreamWeights(
        linear(block.norm1_context.linear),
        linear(attn.add_q_proj, attn.add_k_proj, attn.add_v_proj),
        linear(attn.to_add_out),
        linear(block.ff_context.net[0].proj),
        linear(block.ff_context.net[2]),
    )
    norms = _norms(attn.norm_added_q, attn.norm_added_k), _norms(attn.norm_q, attn.norm_k)
    return Double(image, text, torch.stack(norms))


def _single(block: Any) -> Single:
    attn = block.attn
    return Single(
        linear(block.norm.linear),
        linear(attn.to_q, attn.to_k, attn.to_v, block.proj_mlp),
        _norms(attn.norm_q, attn.norm_k),
        linear(block.proj_out),
    )
