"""FLUX blocks over packed rows, with the real model's weights and no patched forward.

They compute what the matching diffusers block computes for every row alone
(diffusers/models/transformers/transformer_flux.py); attention is in `batch.forward`. The code
before and after attention knows no mask and no cache.

A block's shifts, scales and gates (`Vectors`) depend on timestep, guidance and prompt only, so
those of several steps are computed at once: their weights, a quarter of FLUX.1's, are then read
once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from maskserve_engine.batch.packing import IMAGE, Packing, Stream
from maskserve_engine.batch.row_updates import MovingRows
from maskserve_engine.batch.transfer import copy_tensors, mapped, to_device
from maskserve_engine.families.mmdit.weights import (
    ByMode,
    Double,
    FluxWeights,
    StreamWeights,
    TwoLayers,
)
from maskserve_engine.layers.attention import Span
from maskserve_engine.layers.fp8 import Fp8Linear, quantised_gelu
from maskserve_engine.layers.linear import (
    Linear,
    PlainLinear,
    gelu,
    gelu_of,
    sum_of_parts,
    swiglu,
    write_product,
)
from maskserve_engine.layers.modulation import Norm, PerRow, Vector, add_gated, modulate
from maskserve_engine.layers.qk_norm_rope import qk_norm_rope
from maskserve_engine.spec.mmdit import PRECOMPUTED_STEPS, VECTORS_AT_ONCE

LEAST_PRECOMPUTED_STEPS = PRECOMPUTED_STEPS
"""Minimum number of steps whose vectors are computed at once. A batch that ends earlier loses
little: the time goes into reading the weights."""


def precomputed_steps(passes: int) -> int:
    """Return the number of steps for a batch of so many passes; few passes take more, a lone one a
    whole edit.
    """
    return max(LEAST_PRECOMPUTED_STEPS, VECTORS_AT_ONCE // passes)


@dataclass(frozen=True, slots=True)
class Vectors:
    """Modulation of all blocks at one step. Scales have 1 added."""

    double: tuple[tuple[Tensor, Tensor], ...]
    """Per double block, for image and text: usually [R, 6 · width]."""
    single: tuple[Tensor, ...]
    """Per single block: [R, 3 · width]."""
    last: Tensor | None
    """[R, 2 · width] scale and shift of the last layer; None for a ControlNet, which has none. With
    `timeless` tokens this and the double blocks' image vectors are [2R, …]: the rows' own time,
    then time 0."""
    modes: int = 1
    """3: those of single blocks and the last layer are [3R, …], of images, contexts, then texts."""

    def of(self, index: int) -> Tensor:
        """Return [R, …] vectors of a block's image tokens, double blocks first; shift and scale
        lead.
        """
        if index < len(self.double):
            return self.double[index][0]
        return self.single[index - len(self.double)]

    def take(self, rows: Sequence[int]) -> Vectors:
        first = self.single[0] if self.single else self.double[0][0]
        [indices] = to_device([torch.tensor(rows)], first.device)
        image_rows = indices
        if self.double and len(self.double[0][0]) > len(self.double[0][1]):
            image_rows = torch.cat((indices, indices + len(self.double[0][1])))
        if self.modes > 1:
            all_rows = len(first) // self.modes
            image_rows = indices = torch.cat(
                [indices + mode * all_rows for mode in range(self.modes)]
            )
        return Vectors(
            tuple((image[image_rows], text[indices]) for image, text in self.double),
            tuple(block[indices] for block in self.single),
            None if self.last is None else self.last[image_rows],
            self.modes,
        )

    def with_timeless(self, at_zero: Vectors) -> Vectors:
        """Append the vectors of time 0; only for models without single blocks."""
        assert not self.single, "single blocks have one stream"
        assert self.last is not None
        images = [
            torch.cat((timed[0], zero[0]))
            for timed, zero in zip(self.double, at_zero.double, strict=True)
        ]
        # The last layer's result for timeless tokens is not read.
        double = tuple((image, text) for image, (_, text) in zip(images, self.double, strict=True))
        return Vectors(double, (), torch.cat((self.last, self.last)))


def embed(
    weights: FluxWeights, timesteps: Tensor, pooled: Tensor | None, guidance: Tensor | None
) -> Tensor:
    """Return [S, R, width] embeddings after SiLU, rounded as diffusers' pipeline and model round
    timestep and guidance.

    Args:
        weights: weights of the model.
        timesteps: [S, R] of the sampler, 0 to 1000, float32.
        pooled: [R, pooled width]; None for models without it.
        guidance: [R], times 1000; None for models without it.
    """
    embedder, dtype = weights.time_text_embed, weights.dtype
    rows = [(row, row + 1) for row in range(timesteps.shape[1])]
    times = timesteps
    if embedder.clock is not None:
        # The pipeline divides by 1000 in the latents' dtype and most models multiply again.
        times = timesteps.to(dtype) / 1000 * embedder.clock

    def projected(values: Tensor) -> Tensor:
        return embedder.time_proj(values.flatten()).to(dtype).unflatten(0, values.shape)

    assert embedder.timestep_embedder is not None, "blocks have their vectors of something else"
    emb = _two_layers(embedder.timestep_embedder, projected(times), rows)
    if guidance is not None:
        assert embedder.guidance_embedder is not None
        emb = emb + _two_layers(
            embedder.guidance_embedder, projected(guidance.expand_as(times)), rows
        )
    if pooled is None:
        return F.silu(emb)
    assert embedder.text_embedder is not None
    texts = pooled.repeat(len(times), 1).unflatten(0, times.shape)
    return F.silu(emb + _two_layers(embedder.text_embedder, texts, rows))


def _two_layers(layers: TwoLayers, x: Tensor, rows: Sequence[Span]) -> Tensor:
    return layers.linear_2(F.silu(layers.linear_1(x, rows)), rows)


def vectors(weights: FluxWeights, emb: Tensor) -> tuple[Vectors, ...]:
    """Return the vectors of each step, from embeddings [S, R, width]."""
    width, rows = weights.width, [(row, row + 1) for row in range(emb.shape[1])]

    def vectors_by_step(layer: Linear | None, scale: int = 1) -> tuple[Tensor, ...]:
        """Compute a layer's vectors and add 1 to its scales: part `scale` and every third
        after it.
        """
        assert layer is not None, "blocks without vectors of their own share some"
        out = layer(emb, rows)
        for part in range(scale, out.shape[-1] // width, 3):
            out[..., part * width : (part + 1) * width] += 1
        return out.unbind()

    shared = weights.shared
    if shared is not None:
        double_vectors = vectors_by_step(shared.image), vectors_by_step(shared.text)
        doubles = [double_vectors] * len(weights.double_blocks)
        singles = [vectors_by_step(shared.single)] * len(weights.single_blocks)
    else:
        doubles = [
            (image := vectors_by_step(block.image.vectors), image)
            if block.text is block.image  # a net without text
            else (vectors_by_step(block.image.vectors), vectors_by_step(block.text.vectors))
            for block in weights.double_blocks
        ]
        singles = [vectors_by_step(block.vectors) for block in weights.single_blocks]
    last = None if weights.last_vectors is None else vectors_by_step(weights.last_vectors, 0)
    return tuple(
        Vectors(
            tuple((image[at], text[at]) for image, text in doubles),
            tuple(block[at] for block in singles),
            None if last is None else last[at],
        )
        for at in range(len(emb))
    )


def clip(x: Tensor) -> Tensor:
    """Clip float16 tensors to the finite range; return others unchanged. diffusers clips some
    streams so, because infinity turns into NaN in the next norm.
    """
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x


def split(qkv: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Split into queries and keys [N, 2, heads, head_dim] and values [N, heads, head_dim]."""
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
    norm: Norm | None = None,
    gated: bool = False,
) -> tuple[Tensor, Any]:
    """Compute one stream of a double block after attention [N, width]. With `norm` also return the
    stream through the next block's norm (`add_gated`).
    """
    _, _, gate, shift, scale, mlp_gate, *_ = vectors
    out, up, down = stem.out, stem.up, stem.down
    assert out is not None, "the stream is read behind attention"
    assert up is not None
    assert down is not None
    fp8 = isinstance(up, Fp8Linear)
    half = x.dtype == torch.float16  # its streams are clipped before the next norm
    x, normed = add_gated(x, gate, out(attended, rows), None if half else Norm(shift, scale, fp8))
    if half:
        x = clip(x)
        normed = modulate(x, shift, scale, fp8)
    if gated:
        hidden = down(swiglu(up(normed, rows), inplace=True), rows)
    elif fp8 and isinstance(down, Fp8Linear):
        hidden = down(quantised_gelu(up(normed)))
    else:
        hidden = down(gelu_of(up, normed, rows), rows)
    return add_gated(x, mlp_gate, hidden, norm)


class Modulated(NamedTuple):
    """A stream (or both in row order) at a block's first product."""

    x: Tensor
    vectors: Sequence[Vector]
    normed: Any
    """`x` through its norm, in the form that the product takes."""

    @classmethod
    def of(cls, product: Linear | ByMode, stream: Stream, x: Tensor, vectors: Tensor) -> Any:
        """Return a stream [N, width] modulated by its rows' vectors [R, … · width]."""
        wide = stream.wide(x)
        spread_vectors = stream.spread(vectors, vectors.shape[1] // x.shape[1])
        return cls(
            wide,
            spread_vectors,
            modulate(wide, spread_vectors[0], spread_vectors[1], isinstance(product, Fp8Linear)),
        )


def _product(product: Linear | ByMode, x: Any, packing: Packing, rows: Sequence[Span]) -> Tensor:
    """Return the product of tokens in row order; `rows` are their spans."""
    if not isinstance(product, ByMode):
        return product(x, rows)
    modes = packing.modes
    assert modes is not None, "a model with such products has a context"
    parts = zip(product.parts, modes.split(x), modes.spans, strict=True)
    return modes.join([part(tokens, spans) for part, tokens, spans in parts])


def _norm(product: Linear | ByMode, vectors: Sequence[Vector]) -> Norm:
    return Norm(vectors[0], vectors[1], isinstance(product, Fp8Linear))


_Streams = tuple[Modulated, Modulated]


class FluxStep:
    """A FluxTransformer2DModel at one step (`forward.Transformer`)."""

    def __init__(self, weights: FluxWeights, vectors: Vectors) -> None:
        self.weights, self.vectors = weights, vectors
        self.blocks, self.forms = weights.blocks, weights.forms
        self.block_count, self.two_streams = len(self.blocks), len(weights.double_blocks)
        self.alone, self.mode_blocks = 0, weights.mode_blocks
        self.placed_bytes, self.writes = weights.placed_bytes, weights.writes
        self.updates = weights.updates
        self.gated = weights.gated

    def take(self, rows: Sequence[int]) -> Self:
        return type(self)(self.weights.take(rows), self.vectors.take(rows))

    def copied(self, copy: Callable[[Tensor], Tensor], moving: Sequence[MovingRows]) -> Self:
        return type(self)(self.weights.copied(copy, moving), mapped(self.vectors, copy))

    def follow(self, other: FluxStep) -> None:
        copy_tensors(self.vectors, other.vectors)

    def embed(self, tokens: Tensor, stream: Stream) -> Tensor:
        x, vector_of = self.weights.x_embedder(tokens, stream.spans), stream.vector_of
        embedder = self.weights.context_x_embedder
        if embedder is None or vector_of is None:
            return x
        context = embedder(tokens, stream.spans)
        return torch.where(vector_of[:, None] < len(stream.spans), x, context)

    def pre(
        self,
        number: int,
        text: Tensor,
        image: Tensor,
        packing: Packing,
        cis: Tensor,
        pre_inputs: Any,
        room: Tensor | None,
    ) -> tuple[Tensor, Tensor, Any]:
        block = self.blocks[number]
        if isinstance(block, Double):
            block_vectors = self.vectors.double[number]
            streams: _Streams = pre_inputs or (
                Modulated.of(block.text.qkv, packing.text_stream, text, block_vectors[1]),
                Modulated.of(block.image.qkv, packing.image_stream, image, block_vectors[0]),
            )
            qkv = self._qkv_of_streams(number, block, streams, packing, room)
            qk, v = split(qkv, self.weights.head_dim)
            if block.norms is not None:
                qk_norm_rope(qk, block.norms, cis, packing.stream_of)
            return qk, v, tuple((stream.x, stream.vectors) for stream in streams)
        vectors = self.vectors.single[number - self.two_streams]
        row: Modulated = pre_inputs or Modulated.of(
            block.qkv_up, packing.row_stream, image, vectors
        )
        width, fuses_gelu = image.shape[1], self.forms[number] == "epilogues"
        if fuses_gelu or room is not None:
            assert not isinstance(block.qkv_up, ByMode)
            end = block.qkv_up.out_features
            qkv_part, up_part = (
                block.qkv_up.columns(0, 3 * width),
                block.qkv_up.columns(3 * width, end),
            )
            qkv = image.new_empty(len(image), 3 * width) if room is None else room[: len(image)]
            write_product(qkv_part, row.normed, qkv)
            joined = gelu_of(up_part, row.normed) if fuses_gelu else up_part(row.normed)
        else:
            qkv_and_up = _product(block.qkv_up, row.normed, packing, packing.row_stream.spans)
            qkv, joined = qkv_and_up[:, : 3 * width], qkv_and_up[:, 2 * width :]
        qk, v = split(qkv, block.norms.shape[-1])
        modes = packing.modes if isinstance(block.qkv_up, ByMode) else None
        qk_norm_rope(qk, block.norms, cis, None if modes is None else modes.mode_of)
        return qk, v, (joined, row.x, row.vectors[2])

    def _qkv_of_streams(
        self,
        number: int,
        block: Double,
        streams: _Streams,
        packing: Packing,
        room: Tensor | None,
    ) -> Tensor:
        """Return [N, 3 · width] queries, keys and values in row order, before rotation."""
        text, image = streams
        products = block.text.qkv, block.image.qkv
        spans = packing.text_stream.spans, packing.image_stream.spans
        if room is None and self.forms[number] != "epilogues":
            return packing.rows_from(
                products[0](text.normed, spans[0]), products[1](image.normed, spans[1])
            )
        lengths = [stream_spans[-1][1] for stream_spans in spans]
        if room is None:
            room = image.x.new_empty(sum(lengths), products[0].out_features)
        packed_qkv = room[: sum(lengths)]
        for product, stream, out in zip(products, streams, packed_qkv.split(lengths), strict=True):
            write_product(product, stream.normed, out)
        return packing.in_row_order(packed_qkv)

    def post(
        self,
        number: int,
        text: Tensor,
        image: Tensor,
        attended: Tensor,
        post_inputs: Any,
        packing: Packing,
        *,
        continues: bool,
        image_alone: bool,
    ) -> tuple[Tensor, Tensor, Any]:
        block = self.blocks[number]
        half = image.dtype == torch.float16  # its streams are clipped before the next norm
        if isinstance(block, Double):
            next_block = number + 1 if continues and not half else None
            c, x, ahead = self._after_streams(block, post_inputs, attended, packing, next_block)
            if half:
                c, x = clip(c), clip(x)
            return c.view_as(text), x.view_as(image), ahead
        begin = packing.text[0] if image_alone else 0
        joined, x, gate = post_inputs
        del post_inputs
        rows = packing.row_stream.spans
        if image_alone:
            attended, joined, x, image = (tokens[begin:] for tokens in (attended, joined, x, image))
            rows = packing.image_stream.spans
            if isinstance(gate, PerRow):
                gate = gate._replace(row_of=gate.row_of[begin:])
        if block.down is not None:
            up_width = block.qkv_up.out_features - 3 * attended.shape[1]
            up = swiglu(joined[:, -up_width:])  # beside the values, or alone
            hidden = _product(block.out, attended, packing, rows)
            hidden = hidden + _product(block.down, up, packing, rows)
        elif self.forms[number] == "epilogues":
            assert isinstance(block.out, PlainLinear)
            hidden = sum_of_parts(block.out, (attended, joined))
        elif isinstance(block.out, Fp8Linear):
            up_width = block.qkv_up.out_features - 3 * attended.shape[1]
            up = joined[:, -up_width:]  # beside the values, or alone
            if self.gated:
                hidden = block.out(torch.cat((attended, swiglu(up)), dim=1))
            else:
                hidden = block.out(quantised_gelu(up, attended))
        else:
            # The values are not needed any more. Written in their place, the output of attention
            # needs no copy that joins both, which would cost more.
            values, up = joined.tensor_split((attended.shape[1],), dim=1)
            values.copy_(attended)
            if self.gated:
                joined = joined[:, : attended.shape[1] + swiglu(up, inplace=True).shape[1]]
            else:
                gelu(up, out=up)
            del values, up, attended
            hidden = _product(block.out, joined, packing, rows)
        del joined
        if not continues or half:
            out, _ = add_gated(x, gate, hidden)
            return text, (clip(out) if half else out).view_as(image), None
        following = number + 1 - self.two_streams
        of_next = packing.row_stream.spread(self.vectors.single[following], 3)
        norm = _norm(self.weights.single_blocks[following].qkv_up, of_next)
        out, normed = add_gated(x, gate, hidden, norm)
        return text, out.view_as(image), Modulated(out, of_next, normed)

    def _after_streams(
        self,
        block: Double,
        post_inputs: Sequence[tuple[Tensor, Sequence[Vector]]],
        attended: Tensor,
        packing: Packing,
        next_block: int | None,
    ) -> tuple[Tensor, Tensor, _Streams | None]:
        """Return text and image stream, and the modulated streams for the double block
        `next_block`, if it receives them unchanged.
        """
        (c, c_vectors), (x, x_vectors) = post_inputs
        norms: Sequence[Norm | None] = None, None
        if next_block is not None:
            following, vectors = (
                self.weights.double_blocks[next_block],
                self.vectors.double[next_block],
            )
            width = attended.shape[1]
            of_text = packing.text_stream.spread(vectors[1], vectors[1].shape[1] // width)
            of_image = packing.image_stream.spread(vectors[0], vectors[0].shape[1] // width)
            norms = _norm(following.text.qkv, of_text), _norm(following.image.qkv, of_image)
        c_attended, x_attended = packing.split(attended)
        x, x_normed = stream_post(
            block.image,
            x,
            x_attended,
            x_vectors,
            rows=packing.image_stream.spans,
            norm=norms[1],
            gated=self.gated,
        )
        c, c_normed = stream_post(
            block.text,
            c,
            c_attended,
            c_vectors,
            rows=packing.text_stream.spans,
            norm=norms[0],
            gated=self.gated,
        )
        if next_block is None:
            return c, x, None
        return c, x, (Modulated(c, of_text, c_normed), Modulated(x, of_image, x_normed))

    def project(
        self, number: int, hidden: Tensor, stream: Stream, cis: Tensor
    ) -> tuple[Tensor, Tensor]:
        block, width = self.blocks[number], hidden.shape[1]
        shift, scale = stream.spread(self.vectors.of(number)[:, : 2 * width], 2)
        if isinstance(block, Double):
            assert block.norms is not None, "a ControlNet projects no cached tokens"
            qkv, norms = block.image.qkv, block.norms[1]
        elif isinstance(block.qkv_up, ByMode):  # blocks by mode let nothing read the context
            qkv, norms = block.qkv_up.parts[IMAGE], block.norms[IMAGE]
        else:
            qkv, norms = block.qkv_up, block.norms
        keys_values = qkv.columns(width, 3 * width)
        fp8 = isinstance(keys_values, Fp8Linear)
        normed = modulate(stream.wide(hidden), shift, scale, fp8)
        k, v = keys_values(normed, stream.spans).chunk(2, dim=1)
        k, v = (heads.unflatten(-1, (-1, norms.shape[-1])) for heads in (k, v))
        qk_norm_rope(k[:, None], norms[1:], cis)
        return k, v

    def last(self, image: Tensor, stream: Stream) -> Tensor:
        assert self.vectors.last is not None
        assert self.weights.proj_out is not None
        scale, shift = stream.spread(self.vectors.last, 2)
        return self.weights.proj_out(modulate(stream.wide(image), shift, scale), stream.spans)
