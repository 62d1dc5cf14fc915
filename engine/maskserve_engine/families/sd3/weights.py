"""The weights of an SD3Transformer2DModel, in the form of FLUX.1's blocks.

Differences from FLUX.1: some blocks have a second attention, the last one drops its text after
attention, and a token's position is added to it once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maskserve_engine.families.mmdit.weights import (
    JOINT_ATTENTION,
    OF_DOUBLE,
    OUTSIDE,
    Double,
    FluxWeights,
    StreamWeights,
    block_norms,
    double_of,
    places_in,
    time_text_of,
)
from maskserve_engine.layers.linear import JoinedLinear, Linear, PlainLinear, linear
from maskserve_engine.layers.low_rank import Place


class Second(NamedTuple):
    """A block's second attention, of the picture only."""

    qkv: Linear
    norms: Tensor
    """[2, 1, head_dim] of queries and keys, float32."""
    out: Linear


@dataclass(frozen=True, kw_only=True)
class Sd3Weights(FluxWeights):
    seconds: tuple[Second | None, ...]
    """Second attention by block; None: the block has none."""
    places: Tensor
    """[side, side, width] embedding of each row and column of the largest picture; smaller pictures
    use its middle."""


def weights_of(model: Any, **more: Any) -> Sd3Weights:
    """Build from an SD3Transformer2DModel; `more` are further fields of FluxWeights."""
    blocks, embed = model.transformer_blocks, model.pos_embed
    side = embed.pos_embed_max_size
    with torch.no_grad():
        return Sd3Weights(
            PlainLinear(embed.proj.weight.flatten(1), embed.proj.bias),
            time_text_of(model.time_text_embed)._replace(clock=None),
            linear(model.context_embedder),
            tuple(_last(block) if block.context_pre_only else double_of(block) for block in blocks),
            (),
            linear(model.norm_out.linear),
            linear(model.proj_out),
            model.config.attention_head_dim,
            model.device,
            model.dtype,
            seconds=tuple(_second(block.attn2) for block in blocks),
            places=embed.pos_embed.view(side, side, -1),
            **more,
        )


def _last(block: Any) -> Double:
    attn = block.attn
    norm = linear(block.norm1_context.linear)
    half = norm.out_features // 2
    text = StreamWeights(
        JoinedLinear((norm.columns(half, 2 * half), norm.columns(0, half))),  # scale leads here
        linear(attn.add_q_proj, attn.add_k_proj, attn.add_v_proj),
        None,
        None,
        None,
    )
    image = StreamWeights(
        linear(block.norm1.linear),
        linear(attn.to_q, attn.to_k, attn.to_v),
        linear(attn.to_out[0]),
        linear(block.ff.net[0].proj),
        linear(block.ff.net[2]),
    )
    norms = block_norms(attn.norm_added_q, attn.norm_added_k), block_norms(attn.norm_q, attn.norm_k)
    return Double(image, text, torch.stack(norms))


def _second(attn: Any) -> Second | None:
    if attn is None:
        return None
    norms = block_norms(attn.norm_q, attn.norm_k)
    return Second(linear(attn.to_q, attn.to_k, attn.to_v), norms, linear(attn.to_out[0]))


_OF_SECOND = {
    name.replace("attn.", "attn2."): (product.removeprefix("image."), widths)
    for name, (product, widths) in JOINT_ATTENTION.items()
    if product.startswith("image.")
}
_OUTSIDE = {**OUTSIDE, "pos_embed.proj": "x_embedder"}


def places_of(model: Any) -> dict[str, Place]:
    width: int = model.inner_dim
    places: dict[str, Place] = {}
    for stack, layers in (("double_blocks", OF_DOUBLE), ("seconds", _OF_SECOND)):
        places |= places_in(model, width, {"transformer_blocks": (stack, layers)}, _OUTSIDE)
    last = f"transformer_blocks.{len(model.transformer_blocks) - 1}.norm1_context.linear"
    places[last] = places[last]._replace(swapped=True)
    return places
