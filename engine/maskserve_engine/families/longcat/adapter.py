"""LongCat-Image and LongCat-Image-Edit, where their rows differ from FLUX.1's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.graphs import Graphs
from maskserve_engine.families.flux.adapter import FluxAdapter, FluxBatch
from maskserve_engine.families.longcat import spec as longcat
from maskserve_engine.families.mmdit.preparation import FlowPreparation, Grid, latents_shape
from maskserve_engine.families.mmdit.weights import OUTSIDE, FluxWeights, places_of
from maskserve_engine.layers.low_rank import Place
from maskserve_engine.spec.family import FamilyModule
from maskserve_engine.stages.latents import draw

_OUTSIDE = OUTSIDE | {
    f"time_embed.timestep_embedder.linear_{n}": f"time_text_embed.timestep_embedder.linear_{n}"
    for n in (1, 2)
}


class LongCatEditAdapter(FluxAdapter):
    family: ClassVar[FamilyModule] = longcat
    transformer = "LongCatImageTransformer2DModel"
    flow_sigmas = frozenset()

    def weights_of(self, model: Any, placed_bytes: int, graphs: Graphs | None) -> FluxWeights:
        return replace(
            FluxWeights.of(model, "time_embed"), placed_bytes=placed_bytes, graphs=graphs
        )

    @staticmethod
    def places_of(model: Any) -> Mapping[str, Place]:
        return places_of(model, _OUTSIDE)

    @staticmethod
    def ids(pictures: Sequence[Grid], text: int) -> Tensor:
        """Return [T + N, 3] positions: words on the diagonal, then pictures by their number, from
        1, and by rows and columns behind the last word.
        """
        words = torch.arange(text)
        tokens = [
            torch.cartesian_prod(
                torch.tensor([number]), text + torch.arange(rows), text + torch.arange(columns)
            )
            for number, (rows, columns) in enumerate(pictures, 1)
        ]
        return torch.cat((torch.stack((0 * words, words, words), dim=1), *tokens))


class LongCatPreparation(FlowPreparation):
    def noise(self, job: EditJob, generator: torch.Generator) -> Tensor:
        """Return noise drawn in float32, whatever the model's dtype."""
        return draw(latents_shape(job), generator, torch.float32).to(self._dtype)


class LongCatBatch(FluxBatch):
    @staticmethod
    def guide(positive: Tensor, negative: Tensor, scale: float) -> None:
        """Guide; then shorten each token's answer that is longer than its first pass's."""
        length = positive.norm(dim=-1, keepdim=True)
        FluxBatch.guide(positive, negative, scale)
        positive.mul_((length / (positive.norm(dim=-1, keepdim=True) + 1e-8)).clamp(max=1.0))


class LongCatAdapter(LongCatEditAdapter):
    batches = LongCatBatch
    preparation = LongCatPreparation
