"""FLUX blocks over packed rows, with the real model's weights and no patched forward.

They compute what the matching diffusers block computes for every row by itself
(diffusers/models/transformers/transformer_flux.py); attention is `batch.forward`'s. What is before
and after it are functions of tensors alone (`stream_…`, `before_…`, `after_…`): nothing in them
knows of masks or caches, and `compiled` compiles them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maskserve_engine.batch.packing import Packing, Stream
from maskserve_engine.families.flux.vectors import Vectors
from maskserve_engine.families.flux.weights import Double, FluxWeights, Single, StreamWeights
from maskserve_engine.layers.attention import Span
from maskserve_engine.layers.fp8 import Fp8Linear, Tokens, quantised_gelu
from maskserve_engine.layers.linear import (
    Linear,
    PlainLinear,
    gelu_of,
    in_epilogues,
    product_of,
    sum_of_parts,
    write_product,
)
from maskserve_engine.layers.modulation import (
    Vector,
    add_gated,
    add_gated_modulate,
    modulate,
    modulate_fp8,
)
from maskserve_engine.layers.qk_norm_rope import qk_norm_rope


def clip(x: Tensor) -> Tensor:
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x


def modulated(product: Linear, x: Tensor, shift: Vector, scale: Vector) -> Tokens:
    """Tokens through their norm, as the product takes them that reads them."""
    if isinstance(product, Fp8Linear):
        return modulate_fp8(x, shift, scale)
    return modulate(x, shift, scale)


def stream_pre(stem: StreamWeights, normed: Tokens, *, rows: Sequence[Span] = ()) -> Tensor:
    """Queries, keys and values [N, 3 · width] of one stream of a double block, to be `split`; of
    tokens that went through their norm.
    """
    return product_of(stem.qkv, normed, rows)


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
    then: Then | None = None,
) -> tuple[Tensor, Tokens | None]:
    """One stream of a double block after attention; `attended` [N, width]. And the stream through
    the next block's norm, where that is given.
    """
    _, _, gate, shift, scale, mlp_gate = vectors
    fp8 = isinstance(stem.up, Fp8Linear)
    x, normed = add_gated_modulate(x, gate, stem.out(attended, rows), shift, scale, fp8=fp8)
    if fp8 and isinstance(stem.down, Fp8Linear):
        down = stem.down(quantised_gelu(product_of(stem.up, normed)))
    else:
        assert isinstance(normed, Tensor)
        down = stem.down(gelu_of(stem.up, normed, rows), rows)
    return _add_gated(x, mlp_gate, down, then)


class Then(NamedTuple):
    """The norm that reads a stream next."""

    shift: Vector
    scale: Vector
    fp8: bool
    """Whether its product takes tokens in FP8."""

    @classmethod
    def of(cls, product: Linear, vectors: Sequence[Vector]) -> Then:
        return cls(vectors[0], vectors[1], isinstance(product, Fp8Linear))


def _add_gated(
    x: Tensor, gate: Vector, y: Tensor, then: Then | None
) -> tuple[Tensor, Tokens | None]:
    """`add_gated`, and the sum through the norm `then`."""
    if then is None:
        return add_gated(x, gate, y), None
    return add_gated_modulate(x, gate, y, then.shift, then.scale, fp8=then.fp8)


def before_single(
    block: Single, normed: Tokens, *, rows: Sequence[Span] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """What `split` makes in a single block, and [N, 5 · width]: its values again (the same memory)
    beside the feed-forward part before its activation. Of tokens that went through their norm.
    """
    both = product_of(block.qkv_up, normed, rows)
    width = both.shape[1] // 7
    return *split(both[:, : 3 * width], block.norms.shape[-1]), both[:, 2 * width :]


def after_single(
    block: Single,
    x: Tensor,
    joined: Tokens,
    gate: Vector,
    *,
    rows: Sequence[Span] = (),
    then: Then | None = None,
) -> tuple[Tensor, Tokens | None]:
    """`joined` [N, 5 · width]: what attention has found beside the feed-forward part. `then` as in
    `stream_post`.
    """
    out, normed = _add_gated(x, gate, product_of(block.out, joined, rows), then)
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

    def writes_to(self, number: int, device: torch.device) -> bool:
        if self.weights.segments is not None:
            return False
        block = self.blocks[number]
        if isinstance(block, Double):
            own = block.text.qkv, block.image.qkv
        else:
            own = block.qkv_up, block.out
        in_fp8 = all(isinstance(product, Fp8Linear) for product in own)
        return in_fp8 or in_epilogues(*own, device=device)

    def pre(
        self,
        number: int,
        text: Tensor,
        image: Tensor,
        packing: Packing,
        cis: Tensor,
        ahead: Any,
        room: Tensor | None,
    ) -> tuple[Tensor, Tensor, Any]:
        block, segments = self.blocks[number], self.weights.segments
        if isinstance(block, Double):
            both = self.vectors.double[number]
            if segments is not None:
                return *segments.before_double(block, text, image, both, packing, cis), None
            return _before_double(block, text, image, both, packing, cis, ahead, room)
        vectors = self.vectors.single[number - self.two_streams]
        if segments is not None:
            return segments.before_single(block, image, vectors, packing, cis)
        shift, scale, gate = packing.row_stream.spread(vectors, 3)
        wide = packing.row_stream.wide(image)
        normed = modulated(block.qkv_up, wide, shift, scale) if ahead is None else ahead
        kept: Tensor
        inside = in_epilogues(block.qkv_up, block.out, device=image.device)
        if inside or room is not None:
            width = image.shape[1]
            own, up = block.qkv_up.columns(0, 3 * width), block.qkv_up.columns(3 * width, 7 * width)
            qkv = image.new_empty(len(image), 3 * width) if room is None else room[: len(image)]
            write_product(own, normed, qkv)
            qk, v = split(qkv, block.norms.shape[-1])
            if inside:
                assert isinstance(normed, Tensor)
                kept = gelu_of(up, normed)
            else:
                kept = product_of(up, normed)
        else:
            qk, v, kept = before_single(block, normed, rows=packing.row_stream.spans)
        qk_norm_rope(qk, block.norms, cis)
        return qk, v, (kept, wide, gate, inside)

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
        image_alone: bool,
    ) -> tuple[Tensor, Tensor, Any]:
        block, segments = self.blocks[number], self.weights.segments
        goes_on = goes_on and image.dtype != torch.float16  # whose streams are clipped first
        if isinstance(block, Double):
            both = self.vectors.double[number]
            if segments is not None:
                return *segments.after_double(block, text, image, attended, both, packing), None
            norms: tuple[Then | None, Then | None] = None, None
            if goes_on:
                behind, next_both = self.blocks[number + 1], self.vectors.double[number + 1]
                assert isinstance(behind, Double)
                norms = (
                    Then.of(behind.text.qkv, packing.text_stream.spread(next_both[1], 6)),
                    Then.of(behind.image.qkv, packing.image_stream.spread(next_both[0], 6)),
                )
            return _after_double(block, text, image, attended, kept, packing, norms)
        number -= self.two_streams
        vectors, rows = self.vectors.single[number], packing.row_stream.spans
        begin = packing.text[0] if image_alone else 0
        if segments is not None:
            out = segments.after_single(block, image, attended, kept, vectors, packing)
            return text, out[begin:], None
        joined, wide, gate, inside = kept
        if image_alone:
            attended, joined, wide, image = (
                tokens[begin:] for tokens in (attended, joined, wide, image)
            )
            rows = packing.image_stream.spans
        then = None
        if goes_on:
            spread = packing.row_stream.spread(self.vectors.single[number + 1], 3)
            then = Then.of(self.weights.single_blocks[number + 1].qkv_up, spread)
        if inside:
            assert isinstance(block.out, PlainLinear)
            found = sum_of_parts(block.out, (attended, joined))
            out, normed = _add_gated(wide, gate, found, then)
            return text, clip(out).view_as(image), normed
        if isinstance(block.out, Fp8Linear):
            up = joined[:, -4 * attended.shape[1] :]  # beside the values, or alone
            quantised = quantised_gelu(up, attended)
            out, normed = after_single(block, wide, quantised, gate, then=then)
            return text, out.view_as(image), normed
        # Nobody needs the values any more: in their place what was found needs not be joined by a
        # copy of all, which takes more than the copy of itself.
        found, up = joined.tensor_split((attended.shape[1],), dim=1)
        found.copy_(attended)
        torch.ops.aten.gelu_(up, approximate="tanh")
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
        normed = modulated(keys_values, stream.wide(hidden), shift, scale)
        k, v = product_of(keys_values, normed, stream.spans).chunk(2, dim=1)
        k, v = (each.unflatten(-1, (-1, norms.shape[-1])) for each in (k, v))
        qk_norm_rope(k[:, None], norms[1:], cis)
        return k, v

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
    ahead: tuple[Tokens, Tokens] | None,
    room: Tensor | None,
) -> tuple[Tensor, Tensor, _Kept]:
    """`FluxStep.pre` with the vectors of image and text, [R, 6 · width]."""
    of_image = packing.image_stream.spread(vectors[0], 6)
    of_text = packing.text_stream.spread(vectors[1], 6)
    x, c = packing.image_stream.wide(image), packing.text_stream.wide(text)
    images, texts = packing.image_stream.spans, packing.text_stream.spans
    of_streams = block.text.qkv, block.image.qkv
    normed = ahead or (
        modulated(of_streams[0], c, *of_text[:2]),
        modulated(of_streams[1], x, *of_image[:2]),
    )
    if room is not None or in_epilogues(*of_streams, device=image.device):
        both = room
        if both is None:
            both = image.new_empty(len(text) + len(image), of_streams[0].out_features)
        both = both[: len(text) + len(image)]
        for product, each, out in zip(
            of_streams, normed, both.split((len(text), len(image))), strict=True
        ):
            write_product(product, each, out)
        qkv = packing.in_row_order(both)
    else:
        qkv_text = stream_pre(block.text, normed[0], rows=texts)
        qkv_image = stream_pre(block.image, normed[1], rows=images)
        qkv = packing.rows_from(qkv_text, qkv_image)
    qk, v = split(qkv, block.norms.shape[-1])
    qk_norm_rope(qk, block.norms, cis, packing.stream_of)
    return qk, v, (x, c, of_image, of_text)


def _after_double(
    block: Double,
    text: Tensor,
    image: Tensor,
    attended: Tensor,
    kept: _Kept,
    packing: Packing,
    then: tuple[Then | None, Then | None],
) -> tuple[Tensor, Tensor, tuple[Tokens | None, Tokens | None] | None]:
    """`FluxStep.post` with what `_before_double` has left; `then`: the next block's norms of text
    and image.
    """
    x, c, of_image, of_text = kept
    images, texts = packing.image_stream.spans, packing.text_stream.spans
    c_attended, x_attended = packing.split(attended)
    x, image_ahead = stream_post(block.image, x, x_attended, of_image, rows=images, then=then[1])
    c, text_ahead = stream_post(block.text, c, c_attended, of_text, rows=texts, then=then[0])
    ahead = None if then[0] is None else (text_ahead, image_ahead)
    return clip(c.view_as(text)), x.view_as(image), ahead
