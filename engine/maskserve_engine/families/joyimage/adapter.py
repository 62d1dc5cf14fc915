"""JoyImage-Edit, where its rows differ from FLUX.1's: one layer makes the shifts, scales and gates
of all blocks, and each block adds its own numbers to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from maskserve_engine.batch.graphs import Graphs
from maskserve_engine.batch.packing import Stream
from maskserve_engine.families.flux.adapter import FluxAdapter, FluxBatch
from maskserve_engine.families.joyimage import spec as joyimage
from maskserve_engine.families.mmdit.blocks import FluxStep, Vectors, embed
from maskserve_engine.families.mmdit.preparation import PATCH, Grid
from maskserve_engine.families.mmdit.weights import (
    Double,
    FluxWeights,
    StreamWeights,
    TimeTextEmbed,
    TwoLayers,
    block_norms,
    places_in,
)
from maskserve_engine.layers.attention import Span
from maskserve_engine.layers.linear import Linear, PlainLinear, gelu, linear
from maskserve_engine.layers.low_rank import Adapters, Place, low_rank
from maskserve_engine.spec.family import FamilyModule

_TEXT, _TIME = "text_embedder", "time_proj"
_SCALES = (1, 4)
"""Which of a block's six vectors are scales."""
_OF_BLOCK = {
    layer.format(prefix): (f"{stream}.{product}", 0)
    for prefix, stream in {"img": "image", "txt": "text"}.items()
    for layer, product in {
        "attn.{}_attn_qkv": "qkv",
        "attn.{}_attn_proj": "out",
        "{}_mlp.net.0.proj": "up",
        "{}_mlp.net.2": "down",
    }.items()
}
_OUTSIDE = {
    "condition_embedder.time_proj": _TIME,
    "condition_embedder.text_embedder.linear_1": _TEXT,
    "condition_embedder.text_embedder.linear_2": "context_embedder",
    "proj_out": "proj_out",
    **{
        f"condition_embedder.time_embedder.{layer}": f"time_text_embed.timestep_embedder.{layer}"
        for layer in ("linear_1", "linear_2")
    },
}


@dataclass(frozen=True, kw_only=True)
class JoyWeights(FluxWeights):
    text_embedder: Linear
    """Embeds the prompt's states before `context_embedder`, with GELU (tanh) between."""
    time_proj: Linear
    """Makes the six vectors of all blocks."""
    tables: tuple[tuple[Tensor, Tensor], ...]
    """Per block, [6 · width] numbers added to the vectors of its image and text."""


class Float32Linear(NamedTuple):
    """A layer that stays in float32 in a model of half precision; its outputs have the dtype of its
    inputs.
    """

    weight: Tensor
    bias: Tensor

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def __call__(self, x: Tensor, rows: Sequence[Span] = ()) -> Tensor:
        return F.linear(x.float(), self.weight, self.bias).to(x.dtype)

    def columns(self, begin: int, end: int) -> Float32Linear:
        return Float32Linear(self.weight[begin:end], self.bias[begin:end])


class JoyStep(FluxStep):
    """A JoyImageEditTransformer3DModel at one step (`forward.Transformer`)."""

    def last(self, image: Tensor, stream: Stream) -> Tensor:
        """Return velocities; the model has a token's latents one by one, each with all channels."""
        assert self.weights.proj_out is not None
        normed = F.layer_norm(image, image.shape[1:], eps=1e-6)
        out = self.weights.proj_out(normed, stream.spans)
        return out.unflatten(1, (PATCH**2, -1)).mT.flatten(1)


class JoyBatch(FluxBatch):
    def vectors(self, weights: FluxWeights, steps: slice) -> tuple[Vectors, ...]:
        assert isinstance(weights, JoyWeights)
        emb = embed_times(weights, self.timesteps[steps])
        rows = [(row, row + 1) for row in range(emb.shape[1])]
        shared = weights.time_proj(emb, rows)
        for scale in _SCALES:
            shared.unflatten(-1, (6, -1))[..., scale, :] += 1
        return tuple(
            Vectors(tuple((at + image, at + text) for image, text in weights.tables), (), None)
            for at in shared
        )

    def at_step(self, weights: FluxWeights, vectors: Vectors) -> FluxStep:
        return JoyStep(weights, vectors)

    @staticmethod
    def guide(positive: Tensor, negative: Tensor, scale: float) -> None:
        """Guide, then scale each latent's answer to the length of its first pass's."""
        answer = positive.view(len(positive), -1, PATCH**2)  # by channel
        length = answer.norm(dim=1, keepdim=True)
        FluxBatch.guide(positive, negative, scale)
        answer.mul_(length / answer.norm(dim=1, keepdim=True).clamp_min(1e-6))


class JoyImageAdapter(FluxAdapter):
    family: ClassVar[FamilyModule] = joyimage
    transformer = "JoyImageEditTransformer3DModel"
    batches = JoyBatch
    text_varies = True
    text_places: ClassVar[tuple[str, ...]] = (*FluxAdapter.text_places, _TEXT)
    passes_sigmas = False
    flow_sigmas = frozenset()

    @staticmethod
    def shift(config: Mapping[str, Any], tokens: int, steps: int) -> None:
        return None

    def weights_of(self, model: Any, placed_bytes: int, graphs: Graphs | None) -> JoyWeights:
        embedder = model.condition_embedder
        with torch.no_grad():
            return JoyWeights(
                PlainLinear(model.img_in.weight.flatten(1), model.img_in.bias),
                TimeTextEmbed(
                    embedder.timesteps_proj, _time_layers(embedder.time_embedder), None, None, None
                ),
                linear(embedder.text_embedder.linear_2),
                tuple(_double(block) for block in model.double_blocks),
                (),
                None,
                linear(model.proj_out),
                self.spec.denoiser["attention_head_dim"],
                model.device,
                model.dtype,
                placed_bytes,
                graphs,
                text_embedder=linear(embedder.text_embedder.linear_1),
                time_proj=linear(embedder.time_proj),
                tables=tuple(
                    (block.img_mod.modulate_table.flatten(), block.txt_mod.modulate_table.flatten())
                    for block in model.double_blocks
                ),
            )

    @staticmethod
    def places_of(model: Any) -> Mapping[str, Place]:
        stacks = {"double_blocks": ("double_blocks", _OF_BLOCK)}
        return places_in(model, model.hidden_size, stacks, _OUTSIDE)

    def text(self, embeds: Tensor, grid: tuple[int, int], adapters: Adapters = ()) -> Tensor:
        assert isinstance(self.weights, JoyWeights)
        embedder = self.weights.text_embedder
        if adapters:
            embedder = low_rank(_TEXT, embedder, (adapters,))
        return super().text(gelu(embedder(embeds, ((0, len(embeds)),))), grid, adapters)

    def positions(self, height: int, width: int, text: int, references: tuple[Grid, ...]) -> Tensor:
        """Return the factors of the text, which has no positions, and of the pictures, which are
        frames: the edited one, then the references.
        """
        ids = self.ids(((height, width), *references), text)
        model, angles = self.model, []
        for axis, size in enumerate(model.rope_dim_list):
            frequencies = 1.0 / model.theta ** (torch.arange(0, size, 2) / size)
            angles.append(torch.outer(ids[:, axis].float(), frequencies))
        whole = torch.cat(angles, dim=1).to(self.device)
        return torch.polar(torch.ones_like(whole), whole)


def embed_times(weights: JoyWeights, timesteps: Tensor) -> Tensor:
    """Return [S, R, width] embeddings after SiLU of timesteps [S, R]: as in diffusers, in float32
    up to there. If rows have LoRAs on these layers, their input has the model's dtype.
    """
    embedder = weights.time_text_embed
    assert embedder.timestep_embedder is not None, "the model knows the time"
    if not all(isinstance(layer, Float32Linear) for layer in embedder.timestep_embedder):
        return embed(weights, timesteps, None, None)
    first, second = embedder.timestep_embedder
    features = embedder.time_proj(timesteps.flatten()).unflatten(0, timesteps.shape)
    return F.silu(second(F.silu(first(features))).to(weights.dtype))


def _time_layers(embedder: Any) -> TwoLayers:
    """Return the layers that embed the time, which diffusers loads in float32."""
    layers = [
        Float32Linear(layer.weight, layer.bias)
        if layer.weight.dtype == torch.float32
        else linear(layer)
        for layer in (embedder.linear_1, embedder.linear_2)
    ]
    return TwoLayers(*layers)


def _double(block: Any) -> Double:
    attn, streams = block.attn, []
    for qkv, out, mlp in (
        (attn.img_attn_qkv, attn.img_attn_proj, block.img_mlp),
        (attn.txt_attn_qkv, attn.txt_attn_proj, block.txt_mlp),
    ):
        layers = map(linear, (qkv, out, mlp.net[0].proj, mlp.net[2]))
        streams.append(StreamWeights(None, *layers))
    text = block_norms(attn.txt_attn_q_norm, attn.txt_attn_k_norm)
    image = block_norms(attn.img_attn_q_norm, attn.img_attn_k_norm)
    return Double(streams[0], streams[1], torch.stack((text, image)))
