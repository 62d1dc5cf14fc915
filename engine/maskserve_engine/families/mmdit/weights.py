"""The weights of a FLUX transformer, joined where one product replaces several.

The model's own parameters become parts of the joined tensors: nothing is stored twice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from maskserve_engine.batch.graphs import Graphs
from maskserve_engine.batch.row_updates import RowUpdates, RowWeights
from maskserve_engine.layers.fp8 import Fp8Linear
from maskserve_engine.layers.linear import Linear, in_epilogues, linear
from maskserve_engine.layers.low_rank import (
    Place,
    is_layer,
    layer_shape,
)


class TwoLayers(NamedTuple):
    """A TimestepEmbedding, or the projection of the pooled prompt: two linear layers with SiLU
    between.
    """

    linear_1: Linear
    linear_2: Linear


class TimeTextEmbed(NamedTuple):
    """Embeds timestep, guidance and pooled prompt as one vector."""

    time_proj: Any
    timestep_embedder: TwoLayers | None
    """None: the blocks' vectors come from elsewhere."""
    guidance_embedder: TwoLayers | None
    text_embedder: TwoLayers | None
    """None for a model without a pooled prompt."""
    clock: float | None = 1000.0
    """Factor on the pipeline's time, 0 to 1, before projection; None: the model takes the sampler's
    time, unrounded."""


class Shared(NamedTuple):
    """Linear layers that compute shifts, scales and gates shared by all blocks of a kind."""

    image: Linear
    text: Linear
    single: Linear


class StreamWeights(NamedTuple):
    vectors: Linear | None
    """From the time-text embedding: shift, scale and gate, the same for the feed-forward part, and
    for a second attention. None: all blocks share them."""
    qkv: Linear
    out: Linear | None
    up: Linear | None
    down: Linear | None
    """`out`, `up` and `down` are None if no layer reads the stream after the block's attention."""


class Double(NamedTuple):
    image: StreamWeights
    text: StreamWeights
    norms: Tensor | None
    """[2, 2, 1, head_dim] of text and image, queries and keys, float32. None: queries and keys are
    neither normalised nor rotated."""


class ByMode(NamedTuple):
    """A product that tokens of each mode have by themselves (`packing.Modes`)."""

    parts: tuple[Linear, ...]

    @property
    def out_features(self) -> int:
        return self.parts[0].out_features


class Single(NamedTuple):
    vectors: Linear | None
    """From the time-text embedding: shift, scale and gate; None: all blocks share them."""
    qkv_up: Linear | ByMode
    """Queries, keys, values and the feed-forward input."""
    norms: Tensor
    """[2, 1, head_dim] of queries and keys, float32; with products by mode [modes, 2, 1,
    head_dim]."""
    out: Linear | ByMode
    down: Linear | ByMode | None = None
    """None: `out` also takes the feed-forward part."""


Form = Literal["plain", "epilogues", "fp8"]


@dataclass(frozen=True)
class FluxWeights(RowWeights):
    x_embedder: Linear
    time_text_embed: TimeTextEmbed
    context_embedder: Linear | None
    """Embeds the prompt's states; its output is the same at every step, so rows keep it. None for a
    ControlNet that does not read the prompt."""
    double_blocks: tuple[Double, ...]
    single_blocks: tuple[Single, ...]
    last_vectors: Linear | None
    """None for a ControlNet, or if the vectors come from elsewhere."""
    proj_out: Linear | None
    """None for a ControlNet, which ends with its blocks."""
    head_dim: int
    device: torch.device
    dtype: torch.dtype
    placed_bytes: int = 0
    """Bytes that a batch's keys and values may take, over all blocks, to stay placed
    (`PlacedKV`)."""
    graphs: Graphs | None = None
    """Records the steps; None: steps are not recorded."""
    updates: RowUpdates | None = None
    context_x_embedder: Linear | None = None
    """None: `x_embedder` embeds the context, too."""
    shared: Shared | None = None
    gated: bool = False

    @classmethod
    def of(cls, model: Any, embed: str = "time_text_embed") -> FluxWeights:
        """Build from a FluxTransformer2DModel, a FluxControlNetModel or another model with such
        blocks; `embed` is the name of its part that embeds the time.
        """
        doubles, singles = model.transformer_blocks, model.single_transformer_blocks
        whole = hasattr(model, "proj_out")
        with torch.no_grad():
            return cls(
                linear(model.x_embedder),
                time_text_of(getattr(model, embed)),
                linear(model.context_embedder),
                tuple(double_of(block) for block in doubles),
                tuple(_single(block) for block in singles),
                _vectors(model.norm_out) if whole else None,
                linear(model.proj_out) if whole else None,
                (singles or doubles)[0].attn.head_dim,
                model.device,
                model.dtype,
            )

    @cached_property
    def blocks(self) -> tuple[Double | Single, ...]:
        return (*self.double_blocks, *self.single_blocks)

    @cached_property
    def mode_blocks(self) -> int:
        """Number of leading blocks with products by mode."""
        return sum(isinstance(block.qkv_up, ByMode) for block in self.single_blocks)

    @cached_property
    def forms(self) -> tuple[Form, ...]:
        """Per block, how its products before attention are computed."""
        return tuple(_form(block, self.device) for block in self.blocks)

    @cached_property
    def writes(self) -> tuple[bool, ...]:
        """Per block, whether these can write to a given buffer."""
        return tuple(form != "plain" for form in self.forms)

    @property
    def width(self) -> int:
        return self.x_embedder.out_features


def _form(block: Double | Single, device: torch.device) -> Form:
    if isinstance(block, Double):
        products = block.text.qkv, block.image.qkv
    elif isinstance(block.qkv_up, ByMode) or isinstance(block.out, ByMode):
        return "plain"
    else:
        products = block.qkv_up, block.out  # both need the same layout of their input
    if all(isinstance(product, Fp8Linear) for product in products):
        return "fp8"
    return "epilogues" if in_epilogues(*products, device=device) else "plain"


def block_norms(*norms: Any) -> Tensor:
    return torch.stack([norm.weight for norm in norms])[:, None].float()


def image_stream_of(block: Any) -> StreamWeights:
    attn = block.attn
    return StreamWeights(
        _vectors(block.norm1),
        linear(attn.to_q, attn.to_k, attn.to_v),
        linear(attn.to_out[0]),
        linear(block.ff.net[0].proj),
        linear(block.ff.net[2]),
    )


def joint_norms(attn: Any) -> Tensor | None:
    """Return the norms of an attention of text and image (`Double.norms`)."""
    if attn.norm_q is None:
        return None
    norms = block_norms(attn.norm_added_q, attn.norm_added_k), block_norms(attn.norm_q, attn.norm_k)
    return torch.stack(norms)


def double_of(block: Any) -> Double:
    attn = block.attn
    text = StreamWeights(
        _vectors(block.norm1_context),
        linear(attn.add_q_proj, attn.add_k_proj, attn.add_v_proj),
        linear(attn.to_add_out),
        linear(block.ff_context.net[0].proj),
        linear(block.ff_context.net[2]),
    )
    return Double(image_stream_of(block), text, joint_norms(attn))


def _single(block: Any) -> Single:
    attn = block.attn
    return Single(
        _vectors(block.norm),
        linear(attn.to_q, attn.to_k, attn.to_v, block.proj_mlp),
        block_norms(attn.norm_q, attn.norm_k),
        linear(block.proj_out),
    )


def _vectors(norm: Any) -> Linear | None:
    layer = getattr(norm, "linear", None)
    return None if layer is None else linear(layer)


def time_text_of(module: Any) -> TimeTextEmbed:
    names = "timestep_embedder", "guidance_embedder", "text_embedder"
    time, guidance, text = (two_layers(getattr(module, name, None)) for name in names)
    return TimeTextEmbed(module.time_proj, time, guidance, text)


def two_layers(embedder: Any) -> TwoLayers | None:
    """Return the layers of a TimestepEmbedding, if there is one."""
    if embedder is None:
        return None
    return TwoLayers(linear(embedder.linear_1), linear(embedder.linear_2))


JOINT_ATTENTION = {
    "attn.to_q": ("image.qkv", 0),
    "attn.to_k": ("image.qkv", 1),
    "attn.to_v": ("image.qkv", 2),
    "attn.to_out.0": ("image.out", 0),
    "attn.add_q_proj": ("text.qkv", 0),
    "attn.add_k_proj": ("text.qkv", 1),
    "attn.add_v_proj": ("text.qkv", 2),
    "attn.to_add_out": ("text.out", 0),
}
"""Attention layers of a block with two streams, by diffusers' name."""
OF_DOUBLE = {
    "norm1.linear": ("image.vectors", 0),
    "norm1_context.linear": ("text.vectors", 0),
    **JOINT_ATTENTION,
    "ff.net.0.proj": ("image.up", 0),
    "ff.net.2": ("image.down", 0),
    "ff_context.net.0.proj": ("text.up", 0),
    "ff_context.net.2": ("text.down", 0),
}
_OF_SINGLE = {
    "norm.linear": ("vectors", 0),
    "attn.to_q": ("qkv_up", 0),
    "attn.to_k": ("qkv_up", 1),
    "attn.to_v": ("qkv_up", 2),
    "proj_mlp": ("qkv_up", 3),
    "proj_out": ("out", 0),
}
"""Layer of a block → its product, and its offset in the product's outputs, in widths of the
model."""


_STACKS = {
    "transformer_blocks": ("double_blocks", OF_DOUBLE),
    "single_transformer_blocks": ("single_blocks", _OF_SINGLE),
}
OUTSIDE = {
    "norm_out.linear": "last_vectors",
    **{name: name for name in ("x_embedder", "context_embedder", "proj_out")},
    **{
        name: name
        for embedder in ("timestep", "guidance", "text")
        for name in (f"time_text_embed.{embedder}_embedder.linear_{n}" for n in (1, 2))
    },
}


def places_of(
    model: Any, outside: Mapping[str, str] = MappingProxyType(OUTSIDE)
) -> dict[str, Place]:
    """Return the places of the layers that a LoRA may change in `FluxWeights`; `outside` as in
    `places_in`.
    """
    return places_in(model, model.x_embedder.out_features, _STACKS, outside)


_IN_BLOCK = re.compile(r"(.+?)\.(\d+)\.(.+)")
"""Stack, number and layer in the name of a block's layer."""


def places_in(
    model: Any,
    width: int,
    stacks: Mapping[str, tuple[str, Mapping[str, tuple[str, int]]]],
    outside: Mapping[str, str],
    first: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Place]:
    """Return the places of a model's layers.

    Args:
        model: diffusers' model.
        width: width of its tokens.
        stacks: name of a stack of blocks → its name in `FluxWeights`, and by layer the product
            and the offset in its outputs, in widths.
        outside: layer outside the blocks → its product.
        first: name of a stack → number of its first block in `FluxWeights`, if it is not 0.
    """
    places = {}
    for name, module in model.named_modules():
        in_block = _IN_BLOCK.fullmatch(name)
        stack, number, layer = in_block.groups() if in_block else ("", "", "")
        blocks, of_block = stacks.get(stack, ("", {}))
        if name in outside:
            product, widths = outside[name], 0
        elif layer in of_block:
            product, widths = of_block[layer]
            product = f"{blocks}.{int(number) + first.get(stack, 0)}.{product}"
        else:
            continue
        if is_layer(module):
            places[name] = Place(product, widths * width, layer_shape(module))
    return places
