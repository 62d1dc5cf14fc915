"""The weights of a Flux2Transformer2DModel, in the form of FLUX.1's blocks.

Differences from FLUX.1: blocks of a kind share their shifts, scales and gates, and activations are
gated. Single blocks have one product on each side of attention. There is no bias and no pooled
prompt.
"""

from __future__ import annotations

from typing import Any

import torch

from maskserve_engine.families.mmdit.weights import (
    JOINT_ATTENTION,
    Double,
    FluxWeights,
    Shared,
    Single,
    StreamWeights,
    block_norms,
    places_in,
    time_text_of,
)
from maskserve_engine.layers.linear import linear
from maskserve_engine.layers.low_rank import Place


def weights_of(model: Any, **fields: Any) -> FluxWeights:
    """Return the weights of a Flux2Transformer2DModel; `fields` are further ones of FluxWeights."""
    singles = model.single_transformer_blocks
    with torch.no_grad():
        return FluxWeights(
            linear(model.x_embedder),
            time_text_of(model.time_guidance_embed),
            linear(model.context_embedder),
            tuple(_double(block) for block in model.transformer_blocks),
            tuple(_single(block) for block in singles),
            linear(model.norm_out.linear),
            linear(model.proj_out),
            singles[0].attn.head_dim,
            model.device,
            model.dtype,
            shared=Shared(
                linear(model.double_stream_modulation_img.linear),
                linear(model.double_stream_modulation_txt.linear),
                linear(model.single_stream_modulation.linear),
            ),
            gated=True,
            **fields,
        )


def _double(block: Any) -> Double:
    attn = block.attn
    image = StreamWeights(
        None,
        linear(attn.to_q, attn.to_k, attn.to_v),
        linear(attn.to_out[0]),
        linear(block.ff.linear_in),
        linear(block.ff.linear_out),
    )
    text = StreamWeights(
        None,
        linear(attn.add_q_proj, attn.add_k_proj, attn.add_v_proj),
        linear(attn.to_add_out),
        linear(block.ff_context.linear_in),
        linear(block.ff_context.linear_out),
    )
    norms = block_norms(attn.norm_added_q, attn.norm_added_k), block_norms(attn.norm_q, attn.norm_k)
    return Double(image, text, torch.stack(norms))


def _single(block: Any) -> Single:
    attn = block.attn
    norms = block_norms(attn.norm_q, attn.norm_k)
    return Single(None, linear(attn.to_qkv_mlp_proj), norms, linear(attn.to_out))


_DOUBLE_PRODUCTS = {
    **JOINT_ATTENTION,
    "ff.linear_in": ("image.up", 0),
    "ff.linear_out": ("image.down", 0),
    "ff_context.linear_in": ("text.up", 0),
    "ff_context.linear_out": ("text.down", 0),
}
_SINGLE_PRODUCTS = {"attn.to_qkv_mlp_proj": ("qkv_up", 0), "attn.to_out": ("out", 0)}
_STACKS = {
    "transformer_blocks": ("double_blocks", _DOUBLE_PRODUCTS),
    "single_transformer_blocks": ("single_blocks", _SINGLE_PRODUCTS),
}
"""Layer of a block → its product, and its offset in the product's outputs, in widths of the
model."""
_OUTSIDE = {
    "double_stream_modulation_img.linear": "shared.image",
    "double_stream_modulation_txt.linear": "shared.text",
    "single_stream_modulation.linear": "shared.single",
    **{
        f"time_guidance_embed.{name}": f"time_text_embed.{name}"
        for embedder in ("timestep", "guidance")
        for name in (f"{embedder}_embedder.linear_{n}" for n in (1, 2))
    },
    "norm_out.linear": "last_vectors",
    "x_embedder": "x_embedder",
    "context_embedder": "context_embedder",
    "proj_out": "proj_out",
}


def places_of(model: Any) -> dict[str, Place]:
    return places_in(model, model.x_embedder.out_features, _STACKS, _OUTSIDE)
