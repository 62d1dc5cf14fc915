"""FLUX blocks over packed rows, with the real model's weights and no patched forward.

They compute what the matching diffusers block computes for every row by itself
(diffusers/models/transformers/transformer_flux.py); attention is `batch.forward`'s. What is before
and after it are functions of tensors alone (`stream_…`, `before_…`, `after_…`): nothing in them
knows of masks or caches, and `compiled` compiles them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from maskserve_engine.batch.packing import Packing, Stream
from maskserve_engine.families.flux.vectors import Vectors
from maskserve_engine.families.flux.weights import Double, FluxWeights, Single, StreamWeights
from maskserve_engine.layers.attention import Span
from maskserve_engine.layers.linear import (
    PlainLinear,
    gelu_of,
    in_epilogues,
    sum_of_parts,
    write_product,
)
from maskserve_engine.layers.modulation import Vector, add_gated, add_gated_modulate, modulate
from maskserve_engine.layers.qk_norm_rope import qk_norm_rope


def clip(x: Tensor) -> Tensor:
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x


def stream_pre(stem: StreamWeights, normed: Tensor, *, rows: Sequence[Span] = ()) -> Tensor:
    """Queries, keys and values [N, 3 · width] of one stream of a double block, to be `split`; of
    tokens that went through their norm.
    """
    return stem.qkv(normed.flatten(0, -2), rows)


def split(qkv: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Queries and keys [N, 2, heads, head_dim], values [N, heads, head_dim]."""
    tokens, width = qkv.shape[0], qkv.shape[1] // 3
    heads = width // head_dim
    qk = qkv[:, : 2 * width].view(tokens, 2, heads, head_dim)
    return qk, qkv[:, 2 * width :].view(tokens, heads, head_dim)


def stream_post(
    stem: StreamWeights,
    x: Tensor,
    attended: Tensor,
    vectors: Sequence[Vector],
    *,
    rows: Sequence[Span] = (),
    then: Sequence[Vector] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """One stream of a double block after attention; `attended` [N, width]. And the stream through
    the next block's norm, where its shift and scale are given.
    """
    _, _, gate, shift, scale, mlp_gate = vectors
    x, normed = add_gated_modulate(x, gate, stem.out(attended, rows), shift, scale)
    up = gelu_of(stem.up, normed.flatten(0, -2), rows)
    return _add_gated(x, mlp_gate, stem.down(up, rows), then)


def _add_gated(
    x: Tensor, gate: Vector, y: Tensor, then: Sequence[Vector] | None
) -> tuple[Tensor, Tensor | None]:
    """`add_gated`, and the sum through the norm that has the shift and scale `then`."""
    if then is None:
        return add_gated(x, gate, y), None
    return add_gated_modulate(x, gate, y, then[0], then[1])


def before_single(
    block: Single, normed: Tensor, *, rows: Sequence[Span] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """What `split` makes in a single block, and [N, 5 · width]: its values again (the same memory)
    beside the feed-forward part before its activation. Of tokens that went through their norm.
    """
    both, width = block.qkv_up(normed.flatten(0, -2), rows), normed.shape[-1]
    return *split(both[:, : 3 * width], block.norms.shape[-1]), both[:, 2 * width :]


def after_single(
    block: Single,
    x: Tensor,
    joined: Tensor,
    gate: Vector,
    *,
    rows: Sequence[Span] = (),
    then: Sequence[Vector] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`joined` [N, 5 · width]: what attention has found beside the feed-forward part. `then` as in
    `stream_post`.
    """
    out, normed = _add_gated(x, gate, block.out(joined, rows), then)
    return clip(out), normed


class FluxStep:
    """A FluxTransformer2DModel at one step (`forward.Transformer`)."""

    def __init__(self, weights: FluxWeights, vectors: Vectors) -> None:
        self.weights, self.vectors = weights, vectors
        self.blocks = weights.blocks
        self.block_count, self.two_streams = len(self.blocks), len(weights.double_blocks)
        self.resident_bytes = weights.resident_bytes

    def take(self, rows: Sequence[int]) -> FluxStep:
        return FluxStep(self.weights.take(rows), self.vectors.take(rows))

    def embed(self, tokens: Tensor, rows: Sequence[Span]) -> Tensor:
        return self.weights.x_embedder(tokens, rows)

    def pre(
        self,
        number: int,
        text: Tensor,
        image: Tensor,
        packing: Packing,
        cis: Tensor,
        ahead: Any,
    ) -> tuple[Tensor, Tensor, Any]:
        block, segments = self.blocks[number], self.weights.segments
        if isinstance(block, Double):
            both = self.vectors.double[number]
            if segments is not None:
                return *segments.before_double(block, text, image, both, packing, cis), None
            return _before_double(block, text, image, both, packing, cis, ahead)
        vectors = self.vectors.single[number - self.two_streams]
        if segments is not None:
            return segments.before_single(block, image, vectors, packing, cis)
        shift, scale, gate = packing.row_stream.spread(vectors, 3)
        wide = packing.row_stream.wide(image)
        normed = modulate(wide, shift, scale) if ahead is None else ahead
        if in_epilogues(block.qkv_up, block.out, device=image.device):
            width, normed = image.shape[1], normed.flatten(0, -2)
            qkv, up = block.qkv_up.columns(0, 3 * width), block.qkv_up.columns(3 * width, 7 * width)
            qk, v = split(qkv(normed), block.norms.shape[-1])
            return qk_norm_rope(qk, block.norms, cis), v, (gelu_of(up, normed), wide, gate)
        qk, v, joined = before_single(block, normed, rows=packing.row_stream.spans)
        return qk_norm_rope(qk, block.norms, cis), v, (joined, wide, gate)

    def post(
        self,
        number: int,
        text: Tensor,
        image: Tensor,
        attended: Tensor,
        kept: Any,
        packing: Packing,
        *,
        goes_on: bool,
    ) -> tuple[Tensor, Tensor, Any]:
        block, segments = self.blocks[number], self.weights.segments
        goes_on = goes_on and image.dtype != torch.float16  # whose streams are clipped first
        if isinstance(block, Double):
            both = self.vectors.double[number]
            if segments is not None:
                return *segments.after_double(block, text, image, attended, both, packing), None
            next_both = self.vectors.double[number + 1] if goes_on else None
            return _after_double(block, text, image, attended, kept, packing, next_both)
        number -= self.two_streams
        vectors = self.vectors.single[number]
        if segments is not None:
            out = segments.after_single(block, image, attended, kept, vectors, packing)
            return text, out, None
        joined, wide, gate = kept
        then = packing.row_stream.spread(self.vectors.single[number + 1], 3) if goes_on else None
        if in_epilogues(block.qkv_up, block.out, device=image.device):
            assert isinstance(block.out, PlainLinear)
            found = sum_of_parts(block.out, (attended, joined))
            out, normed = _add_gated(wide, gate, found, then)
            return text, clip(out).view_as(image), normed
        # Nobody needs the values any more: in their place what was found needs not be joined by a
        # copy of all, which takes more than the copy of itself.
        found, up = joined.tensor_split((attended.shape[1],), dim=1)
        found.copy_(attended)
        torch.ops.aten.gelu_(up, approximate="tanh")
        rows = packing.row_stream.spans
        out, normed = after_single(block, wide, joined, gate, rows=rows, then=then)
        return text, out.view_as(image), normed

    def project(
        self, number: int, hidden: Tensor, stream: Stream, cis: Tensor
    ) -> tuple[Tensor, Tensor]:
        block, width = self.blocks[number], hidden.shape[1]
        shift, scale = stream.spread(self.vectors.of(number)[:, : 2 * width], 2)
        if isinstance(block, Double):
            qkv, norms = block.image.qkv, block.norms[1]
        else:
            qkv, norms = block.qkv_up, block.norms
        keys_values = qkv.columns(width, 3 * width)
        normed = modulate(stream.wide(hidden), shift, scale).view_as(hidden)
        k, v = keys_values(normed, stream.spans).chunk(2, dim=1)
        k, v = (each.unflatten(-1, (-1, norms.shape[-1])) for each in (k, v))
        return qk_norm_rope(k[:, None], norms[1:], cis)[:, 0], v

    def last(self, image: Tensor, stream: Stream) -> Tensor:
        assert self.vectors.last is not None
        assert self.weights.proj_out is not None
        scale, shift = stream.spread(self.vectors.last, 2)
        normed = modulate(stream.wide(image), shift, scale)
        return self.weights.proj_out(normed.view_as(image), stream.spans)


_Kept = tuple[Tensor, Tensor, Sequence[Vector], Sequence[Vector]]
"""Image and text stream, as wide as their vectors, and these."""


def _before_double(
    block: Double,
    text: Tensor,
    image: Tensor,
    vectors: tuple[Tensor, Tensor],
    packing: Packing,
    cis: Tensor,
    ahead: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, _Kept]:
    """`FluxStep.pre` with the vectors of image and text, [R, 6 · width]."""
    of_image = packing.image_stream.spread(vectors[0], 6)
    of_text = packing.text_stream.spread(vectors[1], 6)
    x, c = packing.image_stream.wide(image), packing.text_stream.wide(text)
    images, texts = packing.image_stream.spans, packing.text_stream.spans
    normed = ahead or (modulate(c, *of_text[:2]), modulate(x, *of_image[:2]))
    of_streams = block.text.qkv, block.image.qkv
    if in_epilogues(*of_streams, device=image.device):
        both = image.new_empty(len(text) + len(image), of_streams[0].out_features)
        for product, each, out in zip(
            of_streams, normed, both.split((len(text), len(image))), strict=True
        ):
            assert isinstance(product, PlainLinear)
            write_product(product, each.flatten(0, -2), out)
        qkv = packing.in_row_order(both)
    else:
        qkv_text = stream_pre(block.text, normed[0], rows=texts)
        qkv_image = stream_pre(block.image, normed[1], rows=images)
        qkv = packing.rows_from(qkv_text, qkv_image)
    norms = block.norms.index_select(0, packing.stream_of)
    qk, v = split(qkv, norms.shape[-1])
    return qk_norm_rope(qk, norms, cis), v, (x, c, of_image, of_text)


def _after_double(
    block: Double,
    text: Tensor,
    image: Tensor,
    attended: Tensor,
    kept: _Kept,
    packing: Packing,
    next_vectors: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, tuple[Tensor | None, Tensor | None] | None]:
    """`FluxStep.post` with what `_before_double` has left; `next_vectors`: of the next block, whose
    norms are taken at once.
    """
    x, c, of_image, of_text = kept
    then: tuple[Sequence[Vector] | None, Sequence[Vector] | None] = None, None
    if next_vectors is not None:
        next_image = packing.image_stream.spread(next_vectors[0], 6)
        then = next_image, packing.text_stream.spread(next_vectors[1], 6)
    images, texts = packing.image_stream.spans, packing.text_stream.spans
    c_attended, x_attended = packing.split(attended)
    x, image_ahead = stream_post(block.image, x, x_attended, of_image, rows=images, then=then[0])
    c, text_ahead = stream_post(block.text, c, c_attended, of_text, rows=texts, then=then[1])
    ahead = None if next_vectors is None else (text_ahead, image_ahead)
    return clip(c.view_as(text)), x.view_as(image), ahead
