"""Z-Image, where its rows differ from other flow-matching transformers'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.graphs import Graphs
from maskserve_engine.families.mmdit.blocks import precomputed_steps
from maskserve_engine.families.mmdit.controlled import ControlledAdapter, ControlledBatch
from maskserve_engine.families.mmdit.preparation import (
    PATCH,
    FlowPreparation,
    FlowPrompt,
    FlowStart,
    Grid,
    grid_of,
    latents_shape,
    pack_latents,
)
from maskserve_engine.families.mmdit.schedule import Schedule
from maskserve_engine.families.z_image import spec as z_image
from maskserve_engine.families.z_image.blocks import ZImageStep, ZImageVectors, refined, vectors
from maskserve_engine.families.z_image.control import ZImageControlNet
from maskserve_engine.families.z_image.spec import PADDED_TO, pads_of
from maskserve_engine.families.z_image.weights import OPENING, ZImageWeights, places_of
from maskserve_engine.layers.low_rank import Adapters, Place
from maskserve_engine.spec.family import FamilyModule
from maskserve_engine.stages.latents import draw

_ZERO = torch.zeros(1, dtype=torch.int64)


class ZImageBatch(ControlledBatch[ZImageWeights]):
    @staticmethod
    def precomputed_steps(passes: int) -> int:
        return precomputed_steps(passes)

    def vectors(self, weights: ZImageWeights, steps: slice) -> Sequence[ZImageVectors]:
        return vectors(weights, self.timesteps[steps])

    def at_step(self, weights: ZImageWeights, vectors: ZImageVectors) -> ZImageStep:
        return ZImageStep(weights, vectors)

    @staticmethod
    def guide(positive: Tensor, negative: Tensor, scale: float) -> None:
        """Guide beyond the first pass's answer: unlike in other families, a scale of 0 leaves it
        unchanged.
        """
        positive.add_(positive - negative, alpha=scale)


class ZImagePreparation(FlowPreparation):
    """Draws random numbers as Z-Image's pipelines do."""

    def start(self, job: EditJob, schedule: Schedule, generator: torch.Generator) -> FlowStart:
        """Prepare latents in float32, in which they stay between steps whatever the model's
        dtype.
        """
        start = super().start(job, schedule, generator)
        return replace(start, latents=start.latents.float())

    def noise(self, job: EditJob, generator: torch.Generator) -> Tensor:
        """Return noise; without a source it is drawn in float32, too."""
        dtype = torch.float32 if job.request.kind == "generate" else self._dtype
        return draw(latents_shape(job), generator, dtype)

    def control_tokens(
        self, moments: NDArray[np.float32], job: EditJob, _: torch.Generator
    ) -> Tensor:
        """Return [N, 4C] tokens of a control picture: of the mean, as the pipeline has it."""
        return pack_latents(self._posterior(moments).mode())


class ZImageAdapter(ControlledAdapter[ZImageWeights]):
    """Steps rows of Z-Image edits over one ZImageTransformer2DModel.

    The model pads a prompt to a multiple of 32 tokens and puts the picture after it on the first
    axis of positions. Here the picture is at 0 and the prompt before it, which attention does not
    distinguish: so a picture's entries do not depend on the prompt's length. A picture is padded,
    too, and its pads stay at the model's position, before the prompt.
    """

    family: ClassVar[FamilyModule] = z_image
    transformer = "ZImageTransformer2DModel"
    batches = ZImageBatch
    text_varies = True
    preparation = ZImagePreparation
    text_places = ("context_embedder", "context_blocks.")
    net_modules = OPENING
    _read_weights: ZImageWeights | None = None
    """See `_opening_weights`."""

    def weights_of(self, model: Any, placed_bytes: int, graphs: Graphs | None) -> ZImageWeights:
        return replace(ZImageWeights.of(model, placed_bytes), graphs=graphs)

    @staticmethod
    def places_of(model: Any) -> Mapping[str, Place]:
        return places_of(model)

    def pads(self, grid: tuple[int, int]) -> int:
        return pads_of(grid[0] * grid[1])

    def text_tokens(self, words: int, grid: tuple[int, int]) -> int:
        return words + pads_of(words) + self.pads(grid)

    def text(self, embeds: Tensor, grid: tuple[int, int], adapters: Adapters = ()) -> Tensor:
        weights, words = self.weights.with_adapters((adapters,)), len(embeds)
        text_cis = self._rotary(words_at(words + pads_of(words)))
        text = refined(weights, embeds, PADDED_TO, text_cis)
        return torch.cat((text, weights.image_pad.expand(self.pads(grid), -1)))

    def positions(self, height: int, width: int, text: int, references: tuple[Grid, ...]) -> Tensor:
        return self._rotary(positions_of(height, width, text, self.pads((height, width))))

    def priming_positions(self, job: EditJob, cis: Tensor) -> Tensor:
        """Let the pads lie where those of the edits lie that read the template."""
        words, pads = len(job.conditioning["prompt_embeds"]), self.pads(grid_of(job))
        pad_cis = self._rotary(pads_at(words + pads_of(words), pads))
        return torch.cat((cis[: len(cis) - pads], pad_cis))

    def _rotary(self, places: Tensor) -> Tensor:
        return rotary(self.model, places, self.device)

    def control_net(self, model: Any) -> ZImageControlNet:
        with torch.inference_mode():
            control_spec, channels = self.spec.control, self.spec.latent_channels * PATCH**2
            assert control_spec is not None, "nets of other models are refused"
            return ZImageControlNet.of(
                model, self.model.config, self._opening_weights(model), channels, control_spec
            )

    def _opening_weights(self, net: Any) -> ZImageWeights:
        """Return the base's weights up to its blocks of the picture; a service, whose base has no
        weights, reads them.
        """
        if self.device.type != "meta" or net.device.type == "meta":
            return self.weights
        if self._read_weights is None:
            self._read_weights = self.weights.with_opening(self.modules_for(net))
        return self._read_weights

    def net_prompt(self, job: EditJob, prompt: FlowPrompt) -> dict[str, Tensor]:
        """Return the prompt's tokens at the first block that sees them: they are the net's, too."""
        grid = grid_of(job)
        text = self.text(prompt.embeds, grid)
        cis = self._positions(*grid, len(text), ())[: len(text)]
        return {"embeds": text, "text_cis": torch.view_as_real(cis).clone()}

    def most_ranks(self, job: EditJob) -> int:
        """Limit ranks to passes if the picture is padded: pads are in the text, of which ranks have
        other shares in image-only blocks.
        """
        ranks = super().most_ranks(job)
        passes = 1 if job.negative is None else 2
        return min(ranks, passes) if self.pads(grid_of(job)) else ranks


def words_at(count: int) -> Tensor:
    """Return [count, 3] positions of a prompt's tokens, the last one next to the picture."""
    return torch.cartesian_prod(torch.arange(-count, 0), _ZERO, _ZERO)


def pads_at(words: int, count: int) -> Tensor:
    """Return [count, 3] positions of a picture's pads, before a prompt of `words` tokens."""
    return torch.tensor([-1 - words, 0, 0]).expand(count, 3)


def positions_of(height: int, width: int, text: int, pads: int) -> Tensor:
    """Return [text + height · width, 3] positions of a prompt, its picture's pads, and the
    picture.
    """
    words = text - pads
    image = torch.cartesian_prod(_ZERO, torch.arange(height), torch.arange(width))
    return torch.cat((words_at(words), pads_at(words, pads), image))


def rotary(model: Any, places: Tensor, device: torch.device) -> Tensor:
    """Return [N, head_dim / 2] complex factors of positions [N, 3]; negative ones rotate
    backwards.
    """
    factors = model.rope_embedder(places.abs().to(device))
    sizes = torch.tensor([size // 2 for size in model.axes_dims])
    is_negative = (places < 0).repeat_interleave(sizes, dim=1)
    return torch.where(is_negative.to(device), factors.conj(), factors).resolve_conj()
