"""The weights of a QwenImageTransformer2DModel, in the form of FLUX.1's blocks."""

from __future__ import annotations

from typing import Any

import torch

from maskserve_engine.families.mmdit.weights import (
    JOINT_ATTENTION,
    Double,
    FluxWeights,
    StreamWeights,
    block_norms,
    places_in,
    time_text_of,
)
from maskserve_engine.layers.linear import linear
from maskserve_engine.layers.low_rank import Place


def weights_of(model: Any, **more: Any) -> FluxWeights:
    """Build from a QwenImageTransformer2DModel or a QwenImageControlNetModel; `more` are further
    fields of FluxWeights.
    """
    whole = hasattr(model, "proj_out")
    with torch.no_grad():
        return FluxWeights(
            linear(model.img_in),
            time_text_of(model.time_text_embed)._replace(clock=1.0),
            linear(model.txt_in),
            tuple(_double(block) for block in model.transformer_blocks),
            (),
            linear(model.norm_out.linear) if whole else None,
            linear(model.proj_out) if whole else None,
            model.config.attention_head_dim,
            model.device,
            model.dtype,
            **more,
        )


def _double(block: Any) -> Double:
    attn = block.attn
    image = StreamWeights(
        linear(block.img_mod[1]),
        linear(attn.to_q, attn.to_k, attn.to_v),
        linear(attn.to_out[0]),
        linear(block.img_mlp.net[0].proj),
        linear(block.img_mlp.net[2]),
    )
    text = StreamWeights(
        linear(block.txt_mod[1]),
        linear(attn.add_q_proj, attn.add_k_proj, attn.add_v_proj),
        linear(attn.to_add_out),
        linear(block.txt_mlp.net[0].proj),
        linear(block.txt_mlp.net[2]),
    )
    norms = block_norms(attn.norm_added_q, attn.norm_added_k), block_norms(attn.norm_q, attn.norm_k)
    return Double(image, text, torch.stack(norms))


_OF_BLOCK = {
    "img_mod.1": ("image.vectors", 0),
    "txt_mod.1": ("text.vectors", 0),
    **JOINT_ATTENTION,
    "img_mlp.net.0.proj": ("image.up", 0),
    "img_mlp.net.2": ("image.down", 0),
    "txt_mlp.net.0.proj": ("text.up", 0),
    "txt_mlp.net.2": ("text.down", 0),
}
"""Layer of a block → its product, and its offset in the product's outputs, in widths of the
model."""
_OUTSIDE = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "norm_out.linear": "last_vectors",
    "proj_out": "proj_out",
    "time_text_embed.timestep_embedder.linear_1": "time_text_embed.timestep_embedder.linear_1",
    "time_text_embed.timestep_embedder.linear_2": "time_text_embed.timestep_embedder.linear_2",
}


def places_of(model: Any) -> dict[str, Place]:
    stacks = {"transformer_blocks": ("double_blocks", _OF_BLOCK)}
    return places_in(model, model.img_in.out_features, stacks, _OUTSIDE)
