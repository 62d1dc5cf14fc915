"""Chroma: what of its rows is not FLUX.1's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from maskserve_core.models import chroma
from maskserve_core.models.family import FamilyFacts
from maskserve_engine.batch.graphs import Graphs
from maskserve_engine.families.flux.adapter import FluxAdapter, FluxBatch
from maskserve_engine.families.flux.blocks import Vectors
from maskserve_engine.families.flux.weights import FluxWeights


@dataclass(frozen=True)
class ChromaWeights(FluxWeights):
    """FLUX.1's, whose blocks have no vectors of their own."""

    told: Any = None
    """Module without weights: times [B] to what the approximator is told, [B, vectors, in]."""
    approximator: Any = None
    """Module that makes all vectors of it, [B, vectors, width]. No adapter changes it."""


class ChromaBatch(FluxBatch):
    """Rows stepped by a ChromaTransformer2DModel."""

    def vectors(self, weights: FluxWeights, timesteps: Tensor) -> tuple[Vectors, ...]:
        assert isinstance(weights, ChromaWeights)
        times = timesteps.to(weights.dtype) / 1000 * 1000  # by the pipeline, and by the model
        found = weights.approximator(weights.told(times.flatten()))
        return vectors(weights, found.unflatten(0, timesteps.shape))


class ChromaAdapter(FluxAdapter):
    """Rows of Chroma's edits over one ChromaTransformer2DModel."""

    spec: ClassVar[FamilyFacts] = chroma
    batches = ChromaBatch

    @staticmethod
    def transformer() -> Any:
        from diffusers import ChromaTransformer2DModel

        return ChromaTransformer2DModel

    def weights_of(self, model: Any, placed_bytes: int, graphs: Graphs | None) -> FluxWeights:
        own = ChromaWeights.of(model)
        assert isinstance(own, ChromaWeights)
        return replace(
            own,
            placed_bytes=placed_bytes,
            graphs=graphs,
            told=model.time_text_embed,
            approximator=model.distilled_guidance_layer,
        )


def vectors(weights: FluxWeights, found: Tensor) -> tuple[Vectors, ...]:
    """What the approximator has found, by step and block.

    Args:
        weights: of the model.
        found: [S, R, vectors, width]: three of each single block, six of each double block's image
            stream, then of its text stream, two of the last layer; written to.
    """
    singles, doubles = len(weights.single_blocks), len(weights.double_blocks)
    of_image, of_text = 3 * singles, 3 * singles + 6 * doubles
    scales = [3 * block + 1 for block in range(singles)]
    scales += [of_image + 6 * part + at for part in range(2 * doubles) for at in (1, 4)]
    for scale in (*scales, -1):
        found[:, :, scale] += 1

    def parts(first: int, count: int, blocks: int) -> Sequence[Tensor]:
        """Of each block, [S, R, count · width]."""
        own = found[:, :, first : first + count * blocks]
        return own.unflatten(2, (blocks, count)).flatten(3).unbind(2)

    image, text = parts(of_image, 6, doubles), parts(of_text, 6, doubles)
    single, last = parts(0, 3, singles), found[:, :, -2:].flip(2).flatten(2)
    return tuple(
        Vectors(
            tuple((own[at], other[at]) for own, other in zip(image, text, strict=True)),
            tuple(own[at] for own in single),
            last[at],
        )
        for at in range(len(found))
    )
