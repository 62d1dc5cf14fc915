"""FLUX.1 (dev, schnell, Fill), where it differs from other flow-matching transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from maskserve_engine.base.job import Conditioning
from maskserve_engine.batch.graphs import Graphs
from maskserve_engine.batch.transfer import to_device
from maskserve_engine.families.flux import spec as flux
from maskserve_engine.families.mmdit.blocks import (
    FluxStep,
    Vectors,
    embed,
    precomputed_steps,
    vectors,
)
from maskserve_engine.families.mmdit.control import FluxControlNet
from maskserve_engine.families.mmdit.controlled import ControlledAdapter, ControlledBatch
from maskserve_engine.families.mmdit.preparation import PATCH, Grid
from maskserve_engine.families.mmdit.weights import FluxWeights, places_of
from maskserve_engine.layers.low_rank import Adapters, Place, low_rank
from maskserve_engine.spec.family import FamilyModule

_CONTEXT = "context_embedder"


class FluxBatch(ControlledBatch[FluxWeights]):
    @staticmethod
    def precomputed_steps(passes: int) -> int:
        return precomputed_steps(passes)

    def vectors(self, weights: FluxWeights, steps: slice) -> tuple[Vectors, ...]:
        timesteps = self.timesteps[steps]

        def at(timesteps: Tensor) -> tuple[Vectors, ...]:
            emb = embed(weights, timesteps, self.packed.pooled, self.packed.guidance)
            return vectors(weights, emb)

        if self.packed.layout.narrow.image_stream.vector_of is None:
            return at(timesteps)
        *step_vectors, zero = at(torch.cat((timesteps, torch.zeros_like(timesteps[:1]))))
        return tuple([vectors_of_step.with_timeless(zero) for vectors_of_step in step_vectors])

    def at_step(self, weights: FluxWeights, vectors: Vectors) -> FluxStep:
        return FluxStep(weights, vectors)


class FluxAdapter(ControlledAdapter[FluxWeights]):
    family: ClassVar[FamilyModule] = flux
    transformer = "FluxTransformer2DModel"
    batches = FluxBatch
    text_places: ClassVar[tuple[str, ...]] = (_CONTEXT,)
    flow_sigmas = frozenset({"generate"})

    def weights_of(self, model: Any, placed_bytes: int, graphs: Graphs | None) -> FluxWeights:
        return replace(FluxWeights.of(model), placed_bytes=placed_bytes, graphs=graphs)

    @staticmethod
    def places_of(model: Any) -> Mapping[str, Place]:
        return places_of(model)

    def blank_prompt(self, tokens: int) -> Conditioning:
        blank = super().blank_prompt(tokens)
        if self.weights.time_text_embed.text_embedder is None:
            return blank
        width = self.spec.denoiser["pooled_projection_dim"]
        return {**blank, "pooled": np.zeros(width, np.float32)}

    def text(self, embeds: Tensor, grid: tuple[int, int], adapters: Adapters = ()) -> Tensor:
        embedder = self.weights.context_embedder
        assert embedder is not None, "ControlNets alone may lack it"
        if adapters:
            embedder = low_rank(_CONTEXT, embedder, (adapters,))
        return embedder(embeds, ((0, len(embeds)),))

    @staticmethod
    def ids(pictures: Sequence[Grid], text: int) -> Tensor:
        """Return [T + N, axes] positions of a prompt, and of the picture and its references, of
        these grids: here a picture's number, row and column. Families with others override this.
        """
        tokens = [
            torch.cartesian_prod(torch.tensor([number]), torch.arange(rows), torch.arange(columns))
            for number, (rows, columns) in enumerate(pictures)
        ]
        return torch.cat((torch.zeros(text, 3), *tokens))

    def positions(self, height: int, width: int, text: int, references: tuple[Grid, ...]) -> Tensor:
        ids = self.ids(((height, width), *references), text)
        # Each angle stands twice, side by side.
        cos, sin = self.model.pos_embed(*to_device([ids], self.device))
        return torch.complex(cos[:, ::2].contiguous(), sin[:, ::2].contiguous())

    def control_net(self, model: Any) -> FluxControlNet:
        with torch.inference_mode():
            control_spec, channels = self.spec.control, self.spec.latent_channels * PATCH**2
            assert control_spec is not None, "nets of other models are refused"
            weights = self.weights_of(model, 0, None)
            return FluxControlNet.of(model, weights, self.model, channels, control_spec)
