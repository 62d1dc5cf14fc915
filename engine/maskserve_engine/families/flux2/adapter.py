"""FLUX.2 klein, where its rows differ from FLUX.1's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.graphs import Graphs
from maskserve_engine.families.flux.adapter import FluxAdapter
from maskserve_engine.families.flux2 import spec as flux2
from maskserve_engine.families.flux2.weights import places_of, weights_of
from maskserve_engine.families.mmdit.preparation import (
    PATCH,
    FlowPreparation,
    Grid,
    grid_of,
    latents_shape,
    unpack_latents,
)
from maskserve_engine.families.mmdit.weights import FluxWeights
from maskserve_engine.layers.low_rank import Place
from maskserve_engine.spec.family import FamilyModule
from maskserve_engine.spec.model_spec import ALL_KINDS
from maskserve_engine.stages.latents import draw

REFERENCE = 10
"""Position of the first reference on the first axis; the picture has 0."""


_AT_10_STEPS, _AT_200_STEPS = (8.73809524e-05, 1.89833333), (0.00016927, 0.45666666)
"""Slope and base of the schedule's shift over image tokens, at 10 and at 200 steps."""
_LARGE = 4300
"""Image tokens above which the shift does not depend on the steps."""


class Flux2Preparation(FlowPreparation):
    """Draws random numbers in the order of Flux2KleinInpaintPipeline."""

    def noise(self, job: EditJob, generator: torch.Generator) -> Tensor:
        """Return noise drawn in the shape of packed latents."""
        channels, grid = latents_shape(job)[0], grid_of(job)
        packed = draw(torch.Size((channels * PATCH**2, *grid)), generator, self._dtype)
        return unpack_latents(packed.flatten(1).T, grid)

    def sampled(self, mask: Tensor, size: Sequence[int]) -> Tensor:
        """Resize the mask once per token, bilinearly."""
        height, width = (side // PATCH for side in size)
        tokens = F.interpolate(mask, size=(height, width), mode="bilinear")
        return tokens.repeat_interleave(PATCH, 2).repeat_interleave(PATCH, 3)


class Flux2Adapter(FluxAdapter):
    family: ClassVar[FamilyModule] = flux2
    transformer = "Flux2Transformer2DModel"
    preparation = Flux2Preparation
    flow_sigmas = ALL_KINDS

    @staticmethod
    def shift(config: Mapping[str, Any], tokens: int, steps: int) -> float:
        """Return the shift interpolated between the publisher's measurements; that of large
        pictures does not depend on the steps. (The pipeline's module would import text encoders.)
        """
        few, many = (slope * tokens + base for slope, base in (_AT_10_STEPS, _AT_200_STEPS))
        return many if tokens > _LARGE else many + (few - many) * (200 - steps) / 190

    def weights_of(self, model: Any, placed_bytes: int, graphs: Graphs | None) -> FluxWeights:
        return weights_of(model, placed_bytes=placed_bytes, graphs=graphs)

    @staticmethod
    def places_of(model: Any) -> Mapping[str, Place]:
        return places_of(model)

    @staticmethod
    def ids(pictures: Sequence[Grid], text: int) -> Tensor:
        return ids_of(pictures, text)


def ids_of(pictures: Sequence[Grid], text: int) -> Tensor:
    """Return [T + N, 4] of a prompt and of the picture and its references, of these grids: number,
    row and column of a picture's token; position of a word.
    """
    origin = torch.zeros(1, dtype=torch.int64)
    words = torch.cartesian_prod(origin, origin, origin, torch.arange(text))
    tokens = [
        torch.cartesian_prod(
            torch.tensor([REFERENCE * number]), torch.arange(rows), torch.arange(columns), origin
        )
        for number, (rows, columns) in enumerate(pictures)
    ]
    return torch.cat((words, *tokens))
