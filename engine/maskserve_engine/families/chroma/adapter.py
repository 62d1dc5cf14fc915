"""Chroma, where its rows differ from FLUX.1's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from maskserve_engine.batch.graphs import Graphs
from maskserve_engine.families.chroma import spec as chroma
from maskserve_engine.families.flux.adapter import FluxAdapter, FluxBatch
from maskserve_engine.families.mmdit.blocks import Vectors
from maskserve_engine.families.mmdit.weights import FluxWeights, TwoLayers, places_of
from maskserve_engine.layers.attention import Span
from maskserve_engine.layers.linear import Linear, linear
from maskserve_engine.layers.low_rank import Place, is_layer, layer_shape
from maskserve_engine.spec.family import FamilyModule

_APPROXIMATOR = "distilled_guidance_layer"


class Approximator(NamedTuple):
    """A ChromaApproximator: computes all vectors of a step from the timestep."""

    in_proj: Linear
    layers: tuple[TwoLayers, ...]
    out_proj: Linear
    norms: tuple[Any, ...]
    """A norm module before each of the layers."""

    @classmethod
    def of(cls, module: Any) -> Approximator:
        return cls(
            linear(module.in_proj),
            tuple(
                TwoLayers(linear(layer.linear_1), linear(layer.linear_2)) for layer in module.layers
            ),
            linear(module.out_proj),
            tuple(module.norms),
        )

    def __call__(self, x: Tensor, rows: Sequence[Span]) -> Tensor:
        """Return [S, N, width] from [S, N, in], with rows side by side along N."""
        x = self.in_proj(x, rows)
        for (first, second), norm in zip(self.layers, self.norms, strict=True):
            x = x + second(F.silu(first(norm(x), rows)), rows)
        return self.out_proj(x, rows)


@dataclass(frozen=True)
class ChromaWeights(FluxWeights):
    """FLUX.1's weights, with an approximator in place of the blocks' modulation layers."""

    time_inputs: Any = None
    """Module without weights that maps times [B] to the approximator's input [B, vectors, in]."""
    approximator: Approximator | None = None


class ChromaBatch(FluxBatch):
    def vectors(self, weights: FluxWeights, steps: slice) -> tuple[Vectors, ...]:
        assert isinstance(weights, ChromaWeights)
        assert weights.approximator is not None
        timesteps = self.timesteps[steps]
        times = timesteps.to(weights.dtype) / 1000 * 1000  # by the pipeline, and by the model
        embedded_times = weights.time_inputs(times.flatten())
        rows, count = timesteps.shape[1], embedded_times.shape[1]
        spans = [(row * count, (row + 1) * count) for row in range(rows)]
        modulations = weights.approximator(
            embedded_times.view(len(timesteps), rows * count, -1), spans
        )
        return vectors(weights, modulations.unflatten(1, (rows, count)))


class ChromaAdapter(FluxAdapter):
    family: ClassVar[FamilyModule] = chroma
    transformer = "ChromaTransformer2DModel"
    batches = ChromaBatch
    text_varies = True
    flow_sigmas = frozenset()

    def weights_of(self, model: Any, placed_bytes: int, graphs: Graphs | None) -> FluxWeights:
        base_weights = ChromaWeights.of(model)
        assert isinstance(base_weights, ChromaWeights)
        return replace(
            base_weights,
            placed_bytes=placed_bytes,
            graphs=graphs,
            time_inputs=model.time_text_embed,
            approximator=Approximator.of(model.distilled_guidance_layer),
        )

    @staticmethod
    def places_of(model: Any) -> Mapping[str, Place]:
        return {
            **places_of(model),
            **{
                f"{_APPROXIMATOR}.{name}": Place(f"approximator.{name}", 0, layer_shape(module))
                for name, module in model.get_submodule(_APPROXIMATOR).named_modules()
                if is_layer(module)
            },
        }


def vectors(weights: FluxWeights, vectors_of_times: Tensor) -> tuple[Vectors, ...]:
    """Return the approximator's output by step and block. `vectors_of_times`, [S, R, vectors,
    width], is written to: three vectors of each single block, six of each double block's image
    stream, six of each text stream, two of the last layer.
    """
    singles, doubles = len(weights.single_blocks), len(weights.double_blocks)
    of_image, of_text = 3 * singles, 3 * singles + 6 * doubles
    scales = [3 * block + 1 for block in range(singles)]
    scales += [of_image + 6 * part + at for part in range(2 * doubles) for at in (1, 4)]
    for scale in (*scales, -1):
        vectors_of_times[:, :, scale] += 1

    def parts(first: int, count: int, blocks: int) -> Sequence[Tensor]:
        """Return [S, R, count · width] of each block."""
        span = vectors_of_times[:, :, first : first + count * blocks]
        return span.unflatten(2, (blocks, count)).flatten(3).unbind(2)

    image, text = parts(of_image, 6, doubles), parts(of_text, 6, doubles)
    single, last = parts(0, 3, singles), vectors_of_times[:, :, -2:].flip(2).flatten(2)
    return tuple(
        Vectors(
            tuple(
                (block_part[at], text_part[at])
                for block_part, text_part in zip(image, text, strict=True)
            ),
            tuple(block_part[at] for block_part in single),
            last[at],
        )
        for at in range(len(vectors_of_times))
    )
