"""The weights of a QwenImage21Transformer2DModel, in the form of FLUX.1's blocks.

Differences from FLUX.1: blocks have one stream, here the image stream (text is computed once and is
in no stream), share their scales and gates, and have no shifts. There is no bias and no pooled
prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from maskserve_engine.families.mmdit.weights import (
    Double,
    FluxWeights,
    Shared,
    StreamWeights,
    block_norms,
    places_in,
    time_text_of,
)
from maskserve_engine.layers.attention import Span
from maskserve_engine.layers.linear import Linear, gelu, linear
from maskserve_engine.layers.low_rank import Place


@dataclass(frozen=True, kw_only=True)
class QwenImage21Weights(FluxWeights):
    """The transformer's weights, including those that embed a prompt."""

    text_norm: Tensor
    """[in] float32 norm of a prompt's states."""
    text_epsilon: float
    text_out: Linear
    """Layer after `context_embedder` and GELU."""

    def embedded(self, states: Tensor) -> Tensor:
        """Return [T, width] tokens of a prompt at the first block, from its states [T, in]."""
        rows: tuple[Span, ...] = ((0, len(states)),)
        wide = states.float()
        normed = F.rms_norm(wide, wide.shape[-1:], self.text_norm, self.text_epsilon)
        assert self.context_embedder is not None, "the model reads a prompt"
        return self.text_out(gelu(self.context_embedder(normed.to(states.dtype), rows)), rows)


def weights_of(model: Any, **more: Any) -> QwenImage21Weights:
    """Build from a QwenImage21Transformer2DModel; `more` are further fields of FluxWeights."""
    words, vectors = model.txt_in, linear(model.modulation[1])
    with torch.no_grad():
        return QwenImage21Weights(
            linear(model.img_in),
            time_text_of(model.time_text_embed)._replace(clock=1.0),
            linear(words.in_layer),
            tuple(_block(block) for block in model.transformer_blocks),
            (),
            linear(model.norm_out.linear),
            linear(model.proj_out),
            model.config.attention_head_dim,
            model.device,
            model.dtype,
            shared=Shared(vectors, vectors, vectors),
            gated=True,
            text_norm=words.text_norm.weight.float() + 1.0,
            text_epsilon=words.text_norm.eps,
            text_out=linear(words.out_layer),
            **more,
        )


def _block(block: Any) -> Double:
    attn, mlp = block.attn, block.img_mlp
    image = StreamWeights(
        None,
        linear(attn.to_q, attn.to_k, attn.to_v),
        linear(attn.to_out[0]),
        linear(mlp.gate_layer, mlp.proj),
        linear(mlp.out),
    )
    return Double(image, image, block_norms(attn.norm_q, attn.norm_k)[None].expand(2, -1, -1, -1))


_OF_BLOCK = {
    "attn.to_q": ("image.qkv", 0),
    "attn.to_k": ("image.qkv", 1),
    "attn.to_v": ("image.qkv", 2),
    "attn.to_out.0": ("image.out", 0),
    "img_mlp.gate_layer": ("image.up", 0),
    "img_mlp.out": ("image.down", 0),
}
"""Layer of a block → its product, and its offset in the product's outputs, in widths of the
model."""
_OUTSIDE = {
    "modulation.1": "shared.image",
    "time_text_embed.timestep_embedder.linear_1": "time_text_embed.timestep_embedder.linear_1",
    "time_text_embed.timestep_embedder.linear_2": "time_text_embed.timestep_embedder.linear_2",
    "img_in": "x_embedder",
    "txt_in.in_layer": "context_embedder",
    "txt_in.out_layer": "text_out",
    "norm_out.linear": "last_vectors",
    "proj_out": "proj_out",
}


def places_of(model: Any) -> dict[str, Place]:
    stacks = {"transformer_blocks": ("double_blocks", _OF_BLOCK)}
    places = places_in(model, model.inner_dim, stacks, _OUTSIDE)
    # The values that gates multiply lie beside them.
    gates = {name: place for name, place in places.items() if name.endswith("gate_layer")}
    for name, place in gates.items():
        places[name.replace("gate_layer", "proj")] = place._replace(begin=place.shape[0])
    return places
