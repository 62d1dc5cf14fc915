"""One FLUX block over packed rows, with the real model's weights and no patched forward.

Each function computes what the matching diffusers block computes for every row by itself
(diffusers/models/transformers/transformer_flux.py); the difference is where tokens lie and that a
cached row's inactive tokens enter as keys only (FlashPS §3.1, Fig. 5 and 7). What is before and
after attention are functions of tensors alone (`before_…`, `after_…`): nothing in them knows of
rows, masks or caches, and `compiled` compiles them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from maskserve_engine.batch.packing import Packing, Stream
from maskserve_engine.families.flux.weights import Double, Segments, Single, StreamWeights, Weights
from maskserve_engine.layers.attention import Span, attention
from maskserve_engine.layers.modulation import Vector, add_gated, modulate
from maskserve_engine.layers.qk_norm_rope import qk_norm_rope

CaptureKeys = Callable[[Tensor, Tensor], None]
"""Sees keys (after norm and rotary embedding) and values in row order."""


class FillRest(Protocol):
    """Adds keys and values of the inactive tokens."""

    def __call__(self, k: Tensor, v: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        """[keys, heads, head_dim] of all rows' tokens, from those [N, heads, head_dim] of the
        computed ones.
        """
        ...


def clip(x: Tensor) -> Tensor:
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x


def stream_pre(
    stem: StreamWeights, x: Tensor, shift: Vector, scale: Vector, *, rows: Sequence[Span] = ()
) -> Tensor:
    """Queries, keys and values [N, 3 · width] of one stream of a double block, to be `split`."""
    return stem.qkv(modulate(x, shift, scale).flatten(0, -2), rows)


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
) -> Tensor:
    """One stream of a double block after attention; `attended` [N, width]."""
    _, _, gate, shift, scale, mlp_gate = vectors
    x = add_gated(x, gate, stem.out(attended, rows))
    up = F.gelu(stem.up(modulate(x, shift, scale).flatten(0, -2), rows), approximate="tanh")
    return add_gated(x, mlp_gate, stem.down(up, rows))


def before_single(
    block: Single, x: Tensor, shift: Vector, scale: Vector, *, rows: Sequence[Span] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """What `split` makes in a single block, and [N, 5 · width]: its values again (the same memory)
    beside the feed-forward part before its activation.
    """
    both, width = block.qkv_up(modulate(x, shift, scale).flatten(0, -2), rows), x.shape[-1]
    return *split(both[:, : 3 * width], block.norms.shape[-1]), both[:, 2 * width :]


def after_single(
    block: Single, x: Tensor, joined: Tensor, gate: Vector, *, rows: Sequence[Span] = ()
) -> Tensor:
    """`joined` [N, 5 · width]: what attention has found beside the feed-forward part."""
    return clip(add_gated(x, gate, block.out(joined, rows)))


def _attend(
    qk: Tensor,
    v: Tensor,
    packing: Packing,
    fill: FillRest | None,
    capture: CaptureKeys | None,
) -> Tensor:
    """Attention of the computed tokens, in row order, over all of each row's keys: [N, width].

    `qk` [N, 2, heads, head_dim] are queries and keys, rotated.
    """
    q, k = qk.unbind(1)
    if capture is not None:
        capture(k, v)
    if fill is None:
        return attention(q, k, v, packing.computed).flatten(1)
    keys, values = fill(k, v, packing)
    return attention(q, keys, values, packing.all_keys).flatten(1)


def double_block(
    block: Double,
    text: Tensor,
    image: Tensor,
    vectors: tuple[Tensor, Tensor],
    packing: Packing,
    cis: Tensor,
    fill: FillRest | None = None,
    capture: CaptureKeys | None = None,
    segments: Segments | None = None,
) -> tuple[Tensor, Tensor]:
    """A FluxTransformerBlock.

    Args:
        block: its weights.
        text: [N_text, width], text stream.
        image: [N_image, width], image stream.
        vectors: [R, 6 · width] of image and text (`Vectors.double`).
        packing: where the rows lie.
        cis: [N, head_dim / 2] complex rotary factors in row order.
        fill: adds the inactive tokens' keys and values; None when there are none.
        capture: sees the computed keys and values (priming).
        segments: what is before and after attention, compiled; None: as it stands here.

    Returns:
        text and image streams after the block.
    """
    if segments is not None:
        qk, v = segments.before_double(block, text, image, vectors, packing, cis)
        attended = _attend(qk, v, packing, fill, capture)
        return segments.after_double(block, text, image, attended, vectors, packing)
    of_image = packing.image_stream.spread(vectors[0], 6)
    of_text = packing.text_stream.spread(vectors[1], 6)
    x, c = packing.image_stream.wide(image), packing.text_stream.wide(text)
    images, texts = packing.image_stream.spans, packing.text_stream.spans
    qkv_image = stream_pre(block.image, x, of_image[0], of_image[1], rows=images)
    qkv_text = stream_pre(block.text, c, of_text[0], of_text[1], rows=texts)
    norms = block.norms.index_select(0, packing.stream_of)
    qk, v = split(packing.rows_from(qkv_text, qkv_image), norms.shape[-1])
    attended = _attend(qk_norm_rope(qk, norms, cis), v, packing, fill, capture)
    c_attended, x_attended = packing.split(attended)
    image = stream_post(block.image, x, x_attended, of_image, rows=images).view_as(image)
    text = stream_post(block.text, c, c_attended, of_text, rows=texts).view_as(text)
    return clip(text), image


def single_block(
    block: Single,
    x: Tensor,
    vectors: Tensor,
    packing: Packing,
    cis: Tensor,
    fill: FillRest | None = None,
    capture: CaptureKeys | None = None,
    segments: Segments | None = None,
) -> Tensor:
    """A FluxSingleTransformerBlock over x [N, width] in row order.

    `vectors` [R, 3 · width] are the rows' (`Vectors.single`); other arguments as double_block.
    """
    if segments is not None:
        qk, v, up = segments.before_single(block, x, vectors, packing, cis)
        attended = _attend(qk, v, packing, fill, capture)
        del qk, v  # the values hold all that their product made, seven widths of each token
        return segments.after_single(block, x, attended, up, vectors, packing)
    shift, scale, gate = packing.row_stream.spread(vectors, 3)
    wide = packing.row_stream.wide(x)
    rows = packing.row_stream.spans
    qk, v, joined = before_single(block, wide, shift, scale, rows=rows)
    attended = _attend(qk_norm_rope(qk, block.norms, cis), v, packing, fill, capture)
    # Nobody needs the values any more: in their place what was found needs not be joined by a copy
    # of all, which takes more than the copy of itself.
    found, up = joined.tensor_split((attended.shape[1],), dim=1)
    found.copy_(attended)
    torch.ops.aten.gelu_(up, approximate="tanh")
    return after_single(block, wide, joined, gate, rows=rows).view_as(x)


def project_kv(
    block: Double | Single, hidden: Tensor, vectors: Tensor, stream: Stream, cis: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values of inactive image tokens from their hidden states (FlashPS Fig. 5).

    Args:
        block: its weights.
        hidden: [M, width] at the block's input, packed by row.
        vectors: [R, …] of the block's image tokens, shift and scale first.
        stream: where the rows lie in `hidden`.
        cis: [M, head_dim / 2] complex rotary factors.

    Returns:
        keys (after norm and rotary embedding) and values, [M, heads, head_dim].
    """
    width = hidden.shape[1]
    shift, scale = stream.spread(vectors[:, : 2 * width], 2)
    if isinstance(block, Double):
        qkv, norms = block.image.qkv, block.norms[1]
    else:
        qkv, norms = block.qkv_up, block.norms
    keys_values = qkv.columns(width, 3 * width)
    normed = modulate(stream.wide(hidden), shift, scale).view_as(hidden)
    k, v = keys_values(normed, stream.spans).chunk(2, dim=1)
    k, v = (each.unflatten(-1, (-1, norms.shape[-1])) for each in (k, v))
    return qk_norm_rope(k[:, None], norms[1:], cis)[:, 0], v


def last_layer(weights: Weights, image: Tensor, vectors: Tensor, stream: Stream) -> Tensor:
    """What FluxTransformer2DModel does after its blocks.

    Args:
        weights: whose last layers are run.
        image: [N, width], computed image tokens.
        vectors: [R, 2 · width], scale and shift.
        stream: how the rows lie in `image`.

    Returns:
        [N, out_channels].
    """
    scale, shift = stream.spread(vectors, 2)
    normed = modulate(stream.wide(image), shift, scale)
    return weights.proj_out(normed.view_as(image), stream.spans)
