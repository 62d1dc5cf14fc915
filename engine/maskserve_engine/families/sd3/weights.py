"""The weights of an SD3Transformer2DModel or an SD3ControlNetModel, in the form of FLUX.1's blocks.

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
    image_stream_of,
    joint_norms,
    places_in,
    time_text_of,
)
from maskserve_engine.layers.linear import JoinedLinear, Linear, PlainLinear, linear
from maskserve_engine.layers.low_rank import Place


class Second(NamedTuple):
    """A block's second attention, of the picture only."""

    qkv: Linear
    norms: Tensor | None
    """[2, 1, head_dim] of queries and keys, float32; None: they are not normalised."""
    out: Linear


@dataclass(frozen=True, kw_only=True)
class Sd3Weights(FluxWeights):
    seconds: tuple[Second | None, ...]
    """Second attention by block; None: the block has none."""
    places: Tensor
    """[side, side, width] embedding of each row and column of the largest picture; smaller pictures
    use its middle."""


def weights_of(model: Any, embed: Any, **more: Any) -> Sd3Weights:
    """Build from diffusers' model.

    Args:
        model: an SD3Transformer2DModel or an SD3ControlNetModel.
        embed: its PatchEmbed, or its base's.
        more: further fields of FluxWeights.
    """
    blocks, whole, side = (
        model.transformer_blocks,
        hasattr(model, "proj_out"),
        embed.pos_embed_max_size,
    )
    with torch.no_grad():
        return Sd3Weights(
            patches_of(embed),
            time_text_of(model.time_text_embed)._replace(clock=None),
            None if model.context_embedder is None else linear(model.context_embedder),
            tuple(map(_double, blocks)),
            (),
            linear(model.norm_out.linear) if whole else None,
            linear(model.proj_out) if whole else None,
            model.config.attention_head_dim,
            model.device,
            model.dtype,
            seconds=tuple(_second(getattr(block, "attn2", None)) for block in blocks),
            places=embed.pos_embed.view(side, side, -1),
            **more,
        )


def patches_of(embed: Any) -> PlainLinear:
    """Return the product of a PatchEmbed's convolution with the tokens of a picture."""
    return PlainLinear(embed.proj.weight.flatten(1), embed.proj.bias)


def _double(block: Any) -> Double:
    if not hasattr(block, "norm1_context"):  # of a ControlNet that does not read the prompt
        image = image_stream_of(block)
        return Double(image, image, None)
    return _last(block) if block.context_pre_only else double_of(block)


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
    return Double(image_stream_of(block), text, joint_norms(attn))


def _second(attn: Any) -> Second | None:
    if attn is None:
        return None
    norms = None if attn.norm_q is None else block_norms(attn.norm_q, attn.norm_k)
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
