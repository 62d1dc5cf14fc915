"""Z-Image's blocks over packed rows, with the real model's weights and no patched forward.

They compute what diffusers' ZImageTransformerBlock computes for every row alone; attention is in
`batch.forward`. Picture and text are one stream. The first blocks see only the picture and its pads
(`RowInput.pads`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from maskserve_engine.batch.packing import Packing, Stream
from maskserve_engine.batch.row_updates import MovingRows
from maskserve_engine.batch.transfer import copy_tensors, mapped, to_device
from maskserve_engine.families.mmdit.blocks import clip
from maskserve_engine.families.z_image.weights import ZImageBlock, ZImageWeights
from maskserve_engine.layers.attention import Span, attention, segments
from maskserve_engine.layers.linear import swiglu
from maskserve_engine.layers.modulation import PerRow, Vector
from maskserve_engine.layers.qk_norm_rope import qk_norm_rope

_PATCH = 4
"""Latents per token."""
_TIMES = 256
"""Number of sines and cosines that encode a time."""


@dataclass(frozen=True, slots=True)
class ZImageVectors:
    """Modulation of all blocks at one step. Scales have 1 added, gates are through tanh."""

    blocks: tuple[Tensor, ...]
    """Per block [R, 4 · width]: scale and gate of attention, and of the feed-forward part."""
    last: Tensor
    """[R, width] scale of the last layer."""

    def take(self, rows: Sequence[int]) -> ZImageVectors:
        [at] = to_device([torch.tensor(rows)], self.last.device)
        return ZImageVectors(tuple(block[at] for block in self.blocks), self.last[at])


def vectors(weights: ZImageWeights, timesteps: Tensor) -> tuple[ZImageVectors, ...]:
    """Return the vectors of each step, from timesteps [S, R] of the sampler, 0 to 1000, float32."""
    rows = [(row, row + 1) for row in range(timesteps.shape[1])]
    half = _TIMES // 2
    steps = torch.arange(half, dtype=torch.float32, device=timesteps.device)
    # The model takes the share of denoising that is done, not the share that is left.
    angles = (1000.0 - timesteps)[..., None] * torch.exp(-math.log(10000.0) * steps / half)
    time_features = torch.cat((angles.cos(), angles.sin()), dim=-1).to(weights.dtype)
    first, second = weights.time_embedder
    emb = second(F.silu(first(time_features, rows)), rows)
    of_blocks = []
    for block in weights.blocks:
        assert block.vectors is not None, "blocks of the picture know the time"
        scale, gate, mlp_scale, mlp_gate = block.vectors(emb, rows).chunk(4, dim=-1)
        parts = 1 + scale, gate.tanh(), 1 + mlp_scale, mlp_gate.tanh()
        of_blocks.append(torch.cat(parts, dim=-1))
    last = 1 + weights.last_vectors(F.silu(emb), rows)
    return tuple(
        ZImageVectors(tuple(block[at] for block in of_blocks), last[at])
        for at in range(len(timesteps))
    )


def spread_vectors(stream: Stream, vectors: Tensor, parts: int) -> list[Tensor]:
    """Split per-row vectors [R, parts · D] into tensors that broadcast with `Stream.wide`
    tokens.
    """

    def spread(vector: Vector) -> Tensor:
        return vector.spread() if isinstance(vector, PerRow) else vector

    return [spread(vector) for vector in stream.spread(vectors, parts)]


class ZImageStep:
    """A ZImageTransformer2DModel at one step (`forward.Transformer`)."""

    def __init__(self, weights: ZImageWeights, vectors: ZImageVectors) -> None:
        self.weights, self.vectors, self.blocks = weights, vectors, weights.blocks
        self.block_count, self.two_streams = len(self.blocks), 0
        self.alone, self.mode_blocks = len(weights.image_blocks), 0
        self.placed_bytes, self.writes = weights.placed_bytes, (False,) * self.block_count
        self.updates = weights.updates

    def take(self, rows: Sequence[int]) -> Self:
        return self._with(self.weights.take(rows), self.vectors.take(rows))

    def copied(self, copy: Callable[[Tensor], Tensor], moving: Sequence[MovingRows]) -> Self:
        return self._with(self.weights.copied(copy, moving), mapped(self.vectors, copy))

    def _with(self, weights: ZImageWeights, vectors: ZImageVectors) -> Self:
        step = copy(self)
        step.weights, step.vectors, step.blocks = weights, vectors, weights.blocks
        step.updates = weights.updates
        return step

    def follow(self, other: Self) -> None:
        copy_tensors(self.vectors, other.vectors)

    def embed(self, tokens: Tensor, stream: Stream) -> Tensor:
        """Embed tokens. The model orders a patch's values by channel, not by pixel."""
        patches = tokens.to(self.weights.dtype).unflatten(1, (-1, _PATCH))
        return self.weights.x_embedder(patches.transpose(1, 2).flatten(1), stream.spans)

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
        block, stream = self.blocks[number], packing.row_stream
        scale, *later_vectors = spread_vectors(stream, self.vectors.blocks[number], 4)
        qk, v = queries(self.weights, block, stream.wide(image), scale, cis, stream.spans)
        return qk, v, later_vectors

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
        stream = packing.row_stream
        wide = stream.wide(image)
        hidden = feed_forward(
            self.weights, self.blocks[number], wide, attended, post_inputs, stream.spans
        )
        hidden = hidden.view_as(image)
        return text, hidden[packing.text[0] :] if image_alone else hidden, None

    def project(
        self, number: int, hidden: Tensor, stream: Stream, cis: Tensor
    ) -> tuple[Tensor, Tensor]:
        block, width, weights = self.blocks[number], hidden.shape[1], self.weights
        scale, *_ = spread_vectors(stream, self.vectors.blocks[number], 4)
        normed = normed_by(block.norms[0], stream.wide(hidden), scale, weights.epsilon)
        keys_values = block.qkv.columns(width, 3 * width)(normed, stream.spans)
        k, v = (
            heads.unflatten(1, (-1, block.heads.shape[-1])) for heads in keys_values.chunk(2, dim=1)
        )
        qk_norm_rope(k[:, None], block.heads[1:], cis, epsilon=weights.head_epsilon)
        return k, v

    def last(self, image: Tensor, stream: Stream) -> Tensor:
        """Apply the last layers, in float32 as the latents."""
        [scale] = spread_vectors(stream, self.vectors.last, 1)
        normed = F.layer_norm(stream.wide(image), image.shape[-1:], eps=1e-6) * scale
        patch_values = self.weights.proj_out(normed.flatten(0, -2), stream.spans)
        patches = patch_values.unflatten(1, (_PATCH, -1)).transpose(1, 2)
        return patches.flatten(1).float().neg_()


def normed_by(norm: Tensor, x: Tensor, scale: Tensor | None, epsilon: float) -> Tensor:
    """Return [N, width] tokens, normalised and scaled."""
    normed = F.rms_norm(x, x.shape[-1:], norm, epsilon)
    return (normed if scale is None else normed * scale).flatten(0, -2)


def queries(
    weights: ZImageWeights,
    block: ZImageBlock,
    x: Tensor,
    scale: Tensor | None,
    cis: Tensor,
    rows: Sequence[Span],
) -> tuple[Tensor, Tensor]:
    """Return queries and keys, rotated, [N, 2, heads, head_dim], and values [N, heads,
    head_dim].
    """
    qkv = block.qkv(normed_by(block.norms[0], x, scale, weights.epsilon), rows)
    qkv = qkv.unflatten(1, (3, -1, block.heads.shape[-1]))
    qk_norm_rope(qkv[:, :2], block.heads, cis, epsilon=weights.head_epsilon)
    return qkv[:, :2], qkv[:, 2]


def feed_forward(
    weights: ZImageWeights,
    block: ZImageBlock,
    x: Tensor,
    attended: Tensor,
    vectors: Sequence[Tensor] | None,
    rows: Sequence[Span],
) -> Tensor:
    """Compute a block after attention. float16 overflow is clipped before each norm, which makes
    the values small again.

    Args:
        weights: weights of the model.
        block: the block.
        x: tokens before it, as wide as the vectors.
        attended: [N, width] output of attention.
        vectors: gate of attention, scale and gate of the feed-forward part; None: no
            modulation.
        rows: spans of the rows.
    """
    gate, scale, mlp_gate = vectors or (None, None, None)
    epsilon = weights.epsilon

    def added(x: Tensor, norm: Tensor, y: Tensor, gate: Tensor | None) -> Tensor:
        normed = F.rms_norm(clip(y), y.shape[-1:], norm, epsilon).view_as(x)
        return clip(x + normed if gate is None else torch.addcmul(x, gate, normed))

    x = added(x, block.norms[1], block.out(attended, rows), gate)
    up = block.up(normed_by(block.norms[2], x, scale, epsilon), rows)
    return added(x, block.norms[3], block.down(clip(swiglu(up)), rows), mlp_gate)


def refined(weights: ZImageWeights, embeds: Tensor, multiple: int, cis: Tensor) -> Tensor:
    """Return [T, width] tokens of a prompt at the first block that sees picture and text.

    Args:
        weights: weights with the row's LoRAs.
        embeds: [words, in] states of the prompt.
        multiple: number of tokens to pad to a multiple of.
        cis: [T, head_dim / 2] rotary factors.
    """
    words = len(embeds)
    rows: Sequence[Span] = ((0, words),)
    normed = F.rms_norm(embeds, embeds.shape[-1:], weights.context_norm, weights.epsilon)
    x = weights.context_embedder(normed, rows)
    x = torch.cat((x, weights.text_pad.expand(-words % multiple, -1)))
    rows = ((0, len(x)),)
    for block in weights.context_blocks:
        qk, v = queries(weights, block, x, None, cis, rows)
        q, k = qk.unbind(1)
        attention_out = attention(q, k, v, segments([len(x)], [len(x)], varies=True)).flatten(1)
        x = feed_forward(weights, block, x, attention_out, None, rows)
    return x
