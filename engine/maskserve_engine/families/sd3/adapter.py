"""Stable Diffusion 3.5, where its rows differ from FLUX.1's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskserve_common.errors import InvalidRequest
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.graphs import Graphs
from maskserve_engine.batch.packing import Packing, Stream
from maskserve_engine.batch.transfer import moved
from maskserve_engine.families.flux.adapter import FluxAdapter, FluxBatch
from maskserve_engine.families.mmdit.blocks import FluxStep, Vectors, clip, split, stream_post
from maskserve_engine.families.mmdit.control import FluxControlNet
from maskserve_engine.families.mmdit.preparation import (
    PATCH,
    FlowPreparation,
    FlowStart,
    FlowTemplate,
    Grid,
    grid_of,
    pack_latents,
)
from maskserve_engine.families.mmdit.schedule import Schedule
from maskserve_engine.families.mmdit.weights import FluxWeights
from maskserve_engine.families.sd3 import spec as sd3
from maskserve_engine.families.sd3.weights import (
    Sd3Weights,
    Second,
    patches_of,
    places_of,
    weights_of,
)
from maskserve_engine.layers.attention import Segments, Span, attention, segments
from maskserve_engine.layers.linear import Linear, PlainLinear
from maskserve_engine.layers.low_rank import Place
from maskserve_engine.layers.modulation import Vector, add_gated, modulate
from maskserve_engine.layers.qk_norm_rope import qk_norm_rope
from maskserve_engine.spec.family import FamilyModule

_PATCH = 4
"""Latents per token."""
_EMBED = "pos_embed"


class Sd3Step(FluxStep):
    """An SD3Transformer2DModel at one step (`forward.Transformer`)."""

    @property
    def _sd3_weights(self) -> Sd3Weights:
        assert isinstance(self.weights, Sd3Weights)
        return self.weights

    def embed(self, tokens: Tensor, stream: Stream) -> Tensor:
        """Embed tokens and add their positions, which the last two channels hold
        (`Sd3Preparation`).
        """
        weights = self._sd3_weights
        return placed(weights.x_embedder, weights.places, tokens, stream.spans)

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
        """Run the first part of a block. A second attention is included in the inputs of `post`: it
        sees computed tokens only.
        """
        qk, v, post_inputs = super().pre(number, text, image, packing, cis, pre_inputs, room)
        second = self._sd3_weights.seconds[number]
        if second is not None:
            of_text, (x, vectors) = post_inputs
            post_inputs = (
                of_text,
                (self._attend_alone(second, x, vectors[6:], packing, cis), vectors),
            )
        return qk, v, post_inputs

    def _attend_alone(
        self, second: Second, x: Tensor, vectors: Sequence[Vector], packing: Packing, cis: Tensor
    ) -> Tensor:
        stream, (shift, scale, gate) = packing.image_stream, vectors
        qk, v = split(second.qkv(modulate(x, shift, scale), stream.spans), self.weights.head_dim)
        if second.norms is not None:
            qk_norm_rope(qk, second.norms, cis[: len(qk)])
        q, k = qk.unbind(1)
        attention_out = attention(q, k, v, _alone(tuple(stream.lengths), x.device))
        attention_out = second.out(attention_out.flatten(1), stream.spans)
        return clip(add_gated(x, gate, attention_out)[0])

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
        block = self.weights.double_blocks[number]
        if block.text.out is not None:
            return super().post(
                number, text, image, attended, post_inputs, packing,
                continues=continues, image_alone=image_alone,
            )  # fmt: skip
        _, (x, vectors) = post_inputs
        _, attended = packing.split(attended)
        rows = packing.image_stream.spans
        x, _ = stream_post(block.image, x, attended, vectors, rows=rows)
        return text, clip(x).view_as(image), None

    def last(self, image: Tensor, stream: Any) -> Tensor:
        """Apply the last layers. The model orders a patch's values by channel, not by pixel."""
        patches = super().last(image, stream).unflatten(1, (_PATCH, -1))
        return patches.transpose(1, 2).flatten(1)


def placed(embedder: Linear, places: Tensor, tokens: Tensor, rows: Sequence[Span]) -> Tensor:
    """Embed tokens [N, in + 2] and add their positions, the last two channels, from `places` [side,
    side, width].
    """
    row, column = (tokens[:, -2:].long() + len(places) // 2).unbind(1)
    x = embedder(tokens[:, :-2], rows)
    return (x + places[row, column]).to(x.dtype)


def spread_evenly(count: int, first: int, of: int) -> list[tuple[int, ...]]:
    """Return the base's blocks that receive each of `count` outputs, as in diffusers: all but the
    last of the `of` blocks from `first` on.
    """
    placed: list[list[int]] = [[] for _ in range(count)]
    for number in range(of - 1 if count else 0):
        placed[int(number / (of / count))].append(first + number)
    return [tuple(numbers) for numbers in placed]


@lru_cache(maxsize=16)
def _alone(lengths: tuple[int, ...], device: torch.device) -> Segments:
    """Return the segments of rows with these lengths. Cached, since batches last many steps."""
    return moved(segments(lengths, lengths), device)


class Sd3Batch(FluxBatch):
    def at_step(self, weights: FluxWeights, vectors: Vectors) -> Sd3Step:
        return Sd3Step(weights, vectors)


class Sd3Preparation(FlowPreparation):
    """Draws random numbers in the order of StableDiffusion3InpaintPipeline. Two more channels hold
    each token's row and column, counted from the middle of the largest picture: small enough to be
    exact in half precision.
    """

    def start(self, job: EditJob, schedule: Schedule, generator: torch.Generator) -> FlowStart:
        start = super().start(job, schedule, generator)
        if start.blend is not None and job.request.settings.strength == 1.0:
            start = replace(start, latents=start.blend.noise)  # whatever a sampler leaves of it
        return replace(start, condition=self._places(job))

    def template(self, job: EditJob, noise_seed: int) -> FlowTemplate:
        flow_template = super().template(job, noise_seed)
        return (
            flow_template
            if flow_template.condition is not None
            else replace(flow_template, condition=self._places(job))
        )

    def control_tokens(
        self, moments: NDArray[np.float32], job: EditJob, _: torch.Generator
    ) -> Tensor:
        """Return [N, 4C + 2] tokens of a control picture. The pipeline draws them without the
        edit's generator; here they are the mean.
        """
        picture = pack_latents(self._posterior(moments).mode())
        return torch.cat((picture, self._places(job)), dim=1)

    def _places(self, job: EditJob) -> Tensor:
        """Return [n, 2] positions.

        Raises:
            InvalidRequest: the picture is larger than the model's position table.
        """
        side = int(self._spec.denoiser["pos_embed_max_size"])
        grid = grid_of(job)
        if max(grid) > side:
            most = side * self._spec.token_pixels
            raise InvalidRequest("IMAGE", f"is longer than {most} pixels to the model", "less")
        axes = [torch.arange(n) + (side - n) // 2 - side // 2 for n in grid]
        return torch.cartesian_prod(*axes).to(self._dtype)


class Sd3Adapter(FluxAdapter):
    family: ClassVar[FamilyModule] = sd3
    transformer = "SD3Transformer2DModel"
    batches = Sd3Batch
    preparation = Sd3Preparation
    passes_sigmas = False
    net_modules = (_EMBED,)

    @staticmethod
    def shift(config: Mapping[str, Any], tokens: int, steps: int) -> None:
        """Return None: the pipeline leaves the schedule to its sampler."""

    def weights_of(self, model: Any, placed_bytes: int, graphs: Graphs | None) -> FluxWeights:
        return weights_of(model, model.pos_embed, placed_bytes=placed_bytes, graphs=graphs)

    def control_net(self, model: Any) -> FluxControlNet:
        """Build a net. As in diffusers, one with `force_zeros_for_pooled_projection` sees control
        pictures without the VAE's shift, and no pooled prompt; one without `pos_embed` uses the
        base's.
        """
        with torch.inference_mode():
            control_spec, latents = self.spec.control, self.spec.latents
            assert control_spec is not None, "nets of other models are refused"
            embed, config = model.pos_embed or self.modules_for(model)[_EMBED], model.config
            if embed.pos_embed is None:
                raise ValueError(
                    "its pos_embed_type is null, and nets without positions are refused"
                )
            weights = weights_of(model, embed)
            hint = patches_of(model.pos_embed_input)
            if config.force_zeros_for_pooled_projection:
                assert hint.bias is not None, "a PatchEmbed has a bias"
                unshifted = hint.weight.sum(1) * (latents.shift[0] * latents.scale[0])
                hint = PlainLinear(hint.weight, hint.bias + unshifted)
            return FluxControlNet.of(
                model,
                weights,
                self.model,
                self.spec.latent_channels * PATCH**2,
                control_spec,
                partial(placed, hint, weights.places),
                spread_evenly,
                at_step=Sd3Step,
                pooled=not config.force_zeros_for_pooled_projection,
            )

    @staticmethod
    def places_of(model: Any) -> Mapping[str, Place]:
        return places_of(model)

    def positions(self, height: int, width: int, text: int, references: tuple[Grid, ...]) -> Tensor:
        """Return factors of no rotation: positions are in the tokens."""
        half = self.weights.head_dim // 2
        return torch.ones(text + height * width, half, dtype=torch.complex64, device=self.device)

    def most_ranks(self, job: EditJob) -> int:
        """Limit ranks to passes if blocks have a second attention, which needs all computed tokens
        of a row.
        """
        ranks = super().most_ranks(job)
        passes = 1 if job.negative is None else 2
        return ranks if self.spec.caches else min(ranks, passes)
