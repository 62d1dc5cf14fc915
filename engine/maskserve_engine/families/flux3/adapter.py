"""FLUX.3 klein, where its rows differ from FLUX.2 klein's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from maskserve_engine.batch.graphs import Graphs
from maskserve_engine.families.flux.adapter import FluxBatch
from maskserve_engine.families.flux2.adapter import REFERENCE, Flux2Adapter, ids_of
from maskserve_engine.families.flux3 import spec as flux3
from maskserve_engine.families.flux3.weights import Flux3Weights, places_of, weights_of
from maskserve_engine.families.mmdit.blocks import Vectors
from maskserve_engine.families.mmdit.preparation import Grid
from maskserve_engine.families.mmdit.weights import FluxWeights
from maskserve_engine.layers.low_rank import Place
from maskserve_engine.spec.family import FamilyModule


class Flux3Batch(FluxBatch):
    def vectors(self, weights: FluxWeights, steps: slice) -> tuple[Vectors, ...]:
        assert isinstance(weights, Flux3Weights)
        return weights.vectors(self.timesteps[steps], self.targets[steps])


class Flux3Adapter(Flux2Adapter):
    family: ClassVar[FamilyModule] = flux3
    transformer = "Flux3Transformer2DModel"
    batches = Flux3Batch
    text_varies = True
    flow_sigmas = frozenset()
    sampler_shift = 6.93

    def weights_of(self, model: Any, placed_bytes: int, graphs: Graphs | None) -> FluxWeights:
        return weights_of(model, placed_bytes=placed_bytes, graphs=graphs)

    @staticmethod
    def places_of(model: Any) -> Mapping[str, Place]:
        return places_of(model)

    @property
    def timeless(self) -> bool:
        return True

    @staticmethod
    def ids(pictures: Sequence[Grid], text: int) -> Tensor:
        """Return positions with half a step between tokens, and references before the words."""
        number, row, column, word = ids_of(pictures, text).float().unbind(1)
        return torch.stack((0 * number, row / 2, column / 2, word - number / REFERENCE), dim=1)
