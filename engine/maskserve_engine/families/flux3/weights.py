"""The weights of a Flux3Transformer2DModel, in the form of FLUX.1's blocks.

Differences from FLUX.1: all blocks are single ones, and their shifts, scales and gates are shared.
The first ones have products by mode. Activations are gated. There is no bias and no pooled prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maskserve_engine.families.mmdit.blocks import Vectors, embed
from maskserve_engine.families.mmdit.weights import (
    ByMode,
    FluxWeights,
    Single,
    block_norms,
    places_in,
    time_text_of,
    two_layers,
)
from maskserve_engine.layers.linear import Linear, linear
from maskserve_engine.layers.low_rank import Place

MODES = "image", "image_cond", "txt"
"""The model's names of `packing.IMAGE`, `CONTEXT` and `TEXT`."""


@dataclass(frozen=True, kw_only=True)
class Flux3Weights(FluxWeights):
    mode_vectors: tuple[Linear, ...]
    """By mode: shift, scale and gate of the blocks with products by mode."""
    joint_vectors: tuple[Linear, ...]
    """The same of the other blocks."""

    def vectors(self, times: Tensor, targets: Tensor) -> tuple[Vectors, ...]:
        """Return the vectors of each step, from timesteps [S, R] of the sampler, 0 to 1000,
        float32. Context and text are at time 0.
        """
        assert self.last_vectors is not None
        flow_map = self.time_text_embed.guidance_embedder is not None
        times, targets = ((at / 1000).to(self.dtype) * 1000 for at in (times, targets))
        rows = [(row, row + 1) for row in range(times.shape[1])]
        image, zero = (
            embed(self, at, None, targets if flow_map else None)
            for at in (times, torch.zeros_like(times))
        )
        shared, width = [], self.width
        for layers in (self.mode_vectors, self.joint_vectors):
            products = zip(layers, (image, zero, zero), strict=True)
            shared.append(torch.cat([layer(emb, rows) for layer, emb in products], dim=1))
            shared[-1][..., width : 2 * width] += 1
        last = self.last_vectors(image, rows).repeat(1, len(MODES), 1)
        last[..., :width] += 1
        return tuple(
            Vectors(
                (),
                (modes,) * self.mode_blocks + (joint,) * (len(self.blocks) - self.mode_blocks),
                end,
                len(MODES),
            )
            for modes, joint, end in zip(*shared, last, strict=True)
        )


def weights_of(model: Any, **more: Any) -> Flux3Weights:
    """Build from a Flux3Transformer2DModel; `more` are further fields of FluxWeights."""
    target = two_layers(model.target_timestep_embedder)
    stacks = (*(model.mode_blocks[mode] for mode in MODES[:2]), model.txt_mode_blocks)
    with torch.no_grad():
        return Flux3Weights(
            linear(model.x_embedders["image"]),
            time_text_of(model)._replace(guidance_embedder=target, clock=None),
            linear(model.context_embedder),
            (),
            (
                *(_by_mode(list(map(_single, modes))) for modes in zip(*stacks, strict=True)),
                *map(_single, model.single_transformer_blocks),
            ),
            linear(model.norm_out.linear),
            linear(model.proj_out),
            model.config.attention_head_dim,
            model.device,
            model.dtype,
            context_x_embedder=linear(model.x_embedders["image_cond"]),
            gated=True,
            mode_vectors=_vectors(model.early_stream_modulations),
            joint_vectors=_vectors(model.single_stream_modulations),
            **more,
        )


def _vectors(modulations: Any) -> tuple[Linear, ...]:
    return tuple(linear(modulations[mode].linear) for mode in MODES)


def _single(block: Any) -> Single:
    attn, ff = block.attn, block.ff
    return Single(
        None,
        linear(attn.to_q, attn.to_k, attn.to_v, ff.linear_in),
        block_norms(attn.norm_q, attn.norm_k),
        linear(attn.to_out[0]),
        linear(ff.linear_out),
    )


def _by_mode(modes: Sequence[Any]) -> Single:
    _, qkv_up, norms, out, down = zip(*modes, strict=True)
    return Single(None, ByMode(qkv_up), torch.stack(norms), ByMode(out), ByMode(down))


def _of_block(part: str) -> dict[str, tuple[str, int]]:
    """Return, for each layer of a block, its product and the offset in the product's outputs, in
    widths of the model.
    """
    return {
        **{f"attn.to_{name}": (f"qkv_up{part}", i) for i, name in enumerate("qkv")},
        "ff.linear_in": (f"qkv_up{part}", 3),
        "attn.to_out.0": (f"out{part}", 0),
        "ff.linear_out": (f"down{part}", 0),
    }


_STACKS = {
    "mode_blocks.image": ("single_blocks", _of_block(".parts.0")),
    "mode_blocks.image_cond": ("single_blocks", _of_block(".parts.1")),
    "txt_mode_blocks": ("single_blocks", _of_block(".parts.2")),
    "single_transformer_blocks": ("single_blocks", _of_block("")),
}
_OUTSIDE = {
    "x_embedders.image": "x_embedder",
    "x_embedders.image_cond": "context_x_embedder",
    "context_embedder": "context_embedder",
    "norm_out.linear": "last_vectors",
    "proj_out": "proj_out",
    **{
        f"{name}_embedder.linear_{n}": f"time_text_embed.{embedder}_embedder.linear_{n}"
        for name, embedder in (("timestep", "timestep"), ("target_timestep", "guidance"))
        for n in (1, 2)
    },
    **{
        f"{name}_stream_modulations.{mode}.linear": f"{vectors}.{i}"
        for name, vectors in (("early", "mode_vectors"), ("single", "joint_vectors"))
        for i, mode in enumerate(MODES)
    },
}


def places_of(model: Any) -> dict[str, Place]:
    first = {"single_transformer_blocks": len(model.txt_mode_blocks)}
    return places_in(model, model.inner_dim, _STACKS, _OUTSIDE, first)
