"""The weights of a FluxTransformer2DModel, found once and joined where one product serves several.

The model's own parameters become parts of the joined ones: nothing is held twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from maskserve_engine.families.flux.compiled import CompiledSegments


class Linear(NamedTuple):
    """x · weightᵀ + bias, without the overhead of a module."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    @classmethod
    def of(cls, module: Any) -> Linear:
        return cls(module.weight, module.bias)

    @classmethod
    def joined(cls, modules: Sequence[Any]) -> Linear:
        """The products of several layers with the same input, one beside the other."""
        weight = nn.Parameter(torch.cat([m.weight for m in modules]), requires_grad=False)
        bias = None
        if modules[0].bias is not None:
            bias = nn.Parameter(torch.cat([m.bias for m in modules]), requires_grad=False)
        begin = 0
        for module in modules:
            end = begin + len(module.weight)
            module.weight = nn.Parameter(weight[begin:end], requires_grad=False)
            if bias is not None:
                module.bias = nn.Parameter(bias[begin:end], requires_grad=False)
            begin = end
        return cls(weight, bias)


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
    segments: CompiledSegments | None = None
    """Of the blocks, compiled; None: they run as `blocks` has them."""
    resident_bytes: int = 0
    """That all blocks' keys and values of a batch may take to stay in place (`ResidentKV`)."""

    @classmethod
    def of(cls, model: Any) -> Weights:
        doubles, singles = model.transformer_blocks, model.single_transformer_blocks
        with torch.no_grad():
            return cls(
                Linear.of(model.x_embedder),
                model.time_text_embed,
                tuple(_double(block) for block in doubles),
                tuple(_single(block) for block in singles),
                Linear.of(model.norm_out.linear),
                Linear.of(model.proj_out),
                (singles or doubles)[0].attn.head_dim,
            )

    @property
    def blocks(self) -> tuple[Double | Single, ...]:
        return (*self.double_blocks, *self.single_blocks)

    @property
    def width(self) -> int:
        return self.x_embedder.weight.shape[0]

    @property
    def device(self) -> torch.device:
        return self.x_embedder.weight.device


def _norms(*norms: Any) -> Tensor:
    return torch.stack([norm.weight for norm in norms])[:, None].float()


def _double(block: Any) -> Double:
    attn = block.attn
    image = StreamWeights(
        Linear.of(block.norm1.linear),
        Linear.joined((attn.to_q, attn.to_k, attn.to_v)),
        Linear.of(attn.to_out[0]),
        Linear.of(block.ff.net[0].proj),
        Linear.of(block.ff.net[2]),
    )
    text = StreamWeights(
        Linear.of(block.norm1_context.linear),
        Linear.joined((attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)),
        Linear.of(attn.to_add_out),
        Linear.of(block.ff_context.net[0].proj),
        Linear.of(block.ff_context.net[2]),
    )
    norms = _norms(attn.norm_added_q, attn.norm_added_k), _norms(attn.norm_q, attn.norm_k)
    return Double(image, text, torch.stack(norms))


def _single(block: Any) -> Single:
    attn = block.attn
    return Single(
        Linear.of(block.norm.linear),
        Linear.joined((attn.to_q, attn.to_k, attn.to_v, block.proj_mlp)),
        _norms(attn.norm_q, attn.norm_k),
        Linear.of(block.proj_out),
    )
