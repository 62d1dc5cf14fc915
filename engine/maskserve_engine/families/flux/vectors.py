"""Each block's shifts, scales and gates: what timestep, guidance and prompt do to it.

They depend on nothing else of a step, so those of several steps are computed at once: their
weights, a quarter of FLUX.1's, are then read once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from maskserve_core.models.flux import STEPS_AHEAD, VECTORS_AT_ONCE
from maskserve_engine.batch.transfer import to_device
from maskserve_engine.families.flux.weights import FluxWeights, TwoLayers
from maskserve_engine.layers.attention import Span
from maskserve_engine.layers.linear import Linear

AHEAD = STEPS_AHEAD
"""Steps whose vectors are computed at once, at least. A batch that ends earlier has lost little:
the time goes into reading the weights, not into the products."""


def steps_ahead(passes: int) -> int:
    """Those of a batch of so many passes: few passes have more, all of an edit for one alone."""
    return max(AHEAD, VECTORS_AT_ONCE // passes)


@dataclass(frozen=True, slots=True)
class Vectors:
    """Of one step. Scales have 1 added."""

    double: tuple[tuple[Tensor, Tensor], ...]
    """Per double block, for image and text: [R, 6 · width]."""
    single: tuple[Tensor, ...]
    """Per single block: [R, 3 · width]."""
    last: Tensor | None
    """[R, 2 · width]: scale and shift of the last layer; None: of a ControlNet, which has none."""

    def of(self, index: int) -> Tensor:
        """[R, …] of the image tokens of a block, double blocks first; shift and scale lead."""
        if index < len(self.double):
            return self.double[index][0]
        return self.single[index - len(self.double)]

    def take(self, rows: Sequence[int]) -> Vectors:
        """Those of some rows."""
        first = self.single[0] if self.single else self.double[0][0]
        [at] = to_device([torch.tensor(rows)], first.device)
        return Vectors(
            tuple((image[at], text[at]) for image, text in self.double),
            tuple(block[at] for block in self.single),
            None if self.last is None else self.last[at],
        )


def embed(
    weights: FluxWeights, timesteps: Tensor, pooled: Tensor, guidance: Tensor | None
) -> Tensor:
    """[S, R, width] as every norm takes it: rounded as diffusers' pipeline and model round timestep
    and guidance, and through SiLU.

    Args:
        weights: of the model.
        timesteps: [S, R] the sampler's, 0 to 1000, float32.
        pooled: [R, pooled width]
        guidance: [R], times 1000; None for models without it.
    """
    own, dtype = weights.time_text_embed, pooled.dtype
    rows = [(row, row + 1) for row in range(len(pooled))]
    # The pipeline divides by 1000 in the latents' dtype and the model multiplies again.
    times = timesteps.to(dtype) / 1000 * 1000

    def projected(values: Tensor) -> Tensor:
        return own.time_proj(values.flatten()).to(dtype).unflatten(0, values.shape)

    emb = _between(own.timestep_embedder, projected(times), rows)
    if guidance is not None:
        assert own.guidance_embedder is not None
        emb = emb + _between(own.guidance_embedder, projected(guidance.expand_as(times)), rows)
    texts = pooled.repeat(len(times), 1).unflatten(0, times.shape)
    return F.silu(emb + _between(own.text_embedder, texts, rows))


def _between(layers: TwoLayers, x: Tensor, rows: Sequence[Span]) -> Tensor:
    """[S, R, width] of [S, R, in]."""
    return layers.linear_2(F.silu(layers.linear_1(x, rows)), rows)


def vectors(weights: FluxWeights, emb: Tensor) -> tuple[Vectors, ...]:
    """The vectors of each step.

    Args:
        weights: of the model.
        emb: [S, R, width] from `embed`.
    """
    width, rows = weights.width, [(row, row + 1) for row in range(emb.shape[1])]

    def steps(layer: Linear, scales: tuple[int, ...]) -> tuple[Tensor, ...]:
        out = layer(emb, rows)
        for part in scales:
            out[..., part * width : (part + 1) * width] += 1
        return out.unbind()

    doubles = [
        (steps(block.image.vectors, (1, 4)), steps(block.text.vectors, (1, 4)))
        for block in weights.double_blocks
    ]
    singles = [steps(block.vectors, (1,)) for block in weights.single_blocks]
    last = None if weights.last_vectors is None else steps(weights.last_vectors, (0,))
    return tuple(
        Vectors(
            tuple((image[at], text[at]) for image, text in doubles),
            tuple(block[at] for block in singles),
            None if last is None else last[at],
        )
        for at in range(len(emb))
    )
