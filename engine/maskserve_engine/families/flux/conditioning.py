"""What an edit adds to a FLUX row: Fill's extra channels, or Inpaint's blend after each step; and
latents packed into tokens and back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from maskserve_engine.batch.flow import Schedule
from maskserve_engine.stages.latents import Posterior, draw, noise_outside, template_noise

PATCH = 2  # latents per token along one side, fixed in diffusers' Flux pipelines


def pack_latents(latents: Tensor) -> Tensor:
    """[C, h, w] → tokens [h/2 · w/2, 4C], row-major."""
    c, h, w = latents.shape
    x = latents.view(c, h // PATCH, PATCH, w // PATCH, PATCH)
    return x.permute(1, 3, 0, 2, 4).reshape((h // PATCH) * (w // PATCH), c * PATCH * PATCH)


def unpack_latents(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """Tokens [gh · gw, 4C] → [C, 2gh, 2gw]."""
    gh, gw = grid
    c = tokens.shape[1] // (PATCH * PATCH)
    x = tokens.view(gh, gw, c, PATCH, PATCH).permute(2, 0, 3, 1, 4)
    return x.reshape(c, gh * PATCH, gw * PATCH)


@dataclass(frozen=True, slots=True)
class FluxBlend:
    """Inpaint semantics: outside the mask, latents follow the noised source."""

    mask: Tensor
    """[n, 4C], 1 = edit."""
    clean: Tensor
    """[n, 4C] source latents."""
    noise: Tensor
    """[n, 4C] the request's noise."""

    def apply(self, latents: Tensor, sigma: Tensor, *, last: bool) -> Tensor:
        """Latents after a step that ended at `sigma`."""
        sigma = sigma.to(self.clean.dtype)
        source = self.clean if last else sigma * self.noise + (1.0 - sigma) * self.clean
        return (1 - self.mask) * source + self.mask * latents

    def take(self, index: Tensor) -> FluxBlend:
        return FluxBlend(
            *(each.index_select(0, index) for each in (self.mask, self.clean, self.noise))
        )


@dataclass(frozen=True, slots=True)
class FluxStart:
    """A row's tensors before its first step, all tokens, in the model's dtype."""

    latents: Tensor
    """[n, 4C]"""
    condition: Tensor | None
    """[n, extra channels] for Fill."""
    blend: FluxBlend | None
    """For Inpaint."""

    def take(self, index: Tensor) -> FluxStart:
        return FluxStart(
            self.latents.index_select(0, index),
            None if self.condition is None else self.condition.index_select(0, index),
            None if self.blend is None else self.blend.take(index),
        )


def packed_mask(edit_mask: Tensor, factor: int, dtype: torch.dtype) -> Tensor:
    """Fill's mask channels [n, 4·factor²] of a [H, W] mask of 0 and 1."""
    h, w = edit_mask.shape[0] // factor, edit_mask.shape[1] // factor
    channels = edit_mask.view(h, factor, w, factor).permute(1, 3, 0, 2)
    return pack_latents(channels.reshape(factor * factor, h, w)).to(dtype)


def start_fill(
    image: Posterior,
    masked: Posterior,
    edit_mask: NDArray[np.uint8],
    factor: int,
    schedule: Schedule,
    generator: torch.Generator,
) -> FluxStart:
    """FluxFillPipeline's preparation; draws image sample, noise, masked-image sample, in order."""
    clean = image.sample(generator)
    latents = _mixed(clean, draw(clean.shape, generator, clean.dtype), schedule)
    mask = torch.from_numpy(edit_mask > 127).float()
    condition = torch.cat(
        (pack_latents(masked.sample(generator)), packed_mask(mask, factor, latents.dtype)), dim=1
    )
    return FluxStart(pack_latents(latents), condition, None)


def start_inpaint(
    image: Posterior,
    edit_mask: NDArray[np.uint8],
    factor: int,
    schedule: Schedule,
    generator: torch.Generator,
    outside_seed: int | None,
) -> FluxStart:
    """FluxInpaintPipeline's preparation; the masked image that it encodes is never used.

    Args:
        image: of the source.
        edit_mask: [H, W], above 127 = edit.
        factor: pixels per latent side.
        schedule: the row's.
        generator: of the edit's seed.
        outside_seed: of the noise outside the mask; None: it is the edit's, too.
    """
    clean = image.sample(generator)
    noise = draw(clean.shape, generator, clean.dtype)
    mask = torch.from_numpy(edit_mask > 127).float()[None, None]
    mask = F.interpolate(mask, size=clean.shape[1:])[0].to(clean.dtype)
    if outside_seed is not None:
        noise = noise_outside(noise, mask, outside_seed)
    latents = _mixed(clean, noise, schedule)
    blend = FluxBlend(
        pack_latents(mask.expand_as(latents).contiguous()), pack_latents(clean), pack_latents(noise)
    )
    return FluxStart(pack_latents(latents), None, blend)


def _mixed(clean: Tensor, noise: Tensor, schedule: Schedule) -> Tensor:
    """Latents before the first step."""
    sigma = schedule.sigmas[0].to(clean.dtype)
    return sigma * noise + (1.0 - sigma) * clean


@dataclass(frozen=True, slots=True)
class FluxPrompt:
    """What text encoders answered, in the model's dtype."""

    embeds: Tensor
    """[T, T5 width]"""
    pooled: Tensor


@dataclass(frozen=True, slots=True)
class FluxInputs:
    """What a row begins with."""

    schedule: Schedule
    start: FluxStart
    prompt: FluxPrompt
    negative: FluxPrompt | None


@dataclass(frozen=True, slots=True)
class FluxTemplate:
    """The template's own model inputs: what priming runs on and inactive tokens are pinned to."""

    clean: Tensor
    """[n, 4C] posterior mode of the source."""
    noise: Tensor
    """[n, 4C] the template's own noise."""
    condition: Tensor | None
    """[n, extra channels]: for Fill the unmasked image and an empty mask."""

    def take(self, index: Tensor) -> FluxTemplate:
        condition = None if self.condition is None else self.condition.index_select(0, index)
        clean, noise = self.clean.index_select(0, index), self.noise.index_select(0, index)
        return FluxTemplate(clean, noise, condition)

    def filled(self, factor: int) -> FluxTemplate:
        """With what Fill's models take besides; made where it is used, as it says nothing new."""
        mask = self.clean.new_zeros(len(self.clean), (PATCH * factor) ** 2)
        return replace(self, condition=torch.cat((self.clean, mask), dim=1))

    def at(self, sigma: Tensor) -> Tensor:
        """[n, in_channels] model inputs at `sigma`."""
        sigma = sigma.to(self.clean.dtype)
        latents = sigma * self.noise + (1.0 - sigma) * self.clean
        return latents if self.condition is None else torch.cat((latents, self.condition), dim=1)


def template_inputs(image: Posterior, noise_seed: int) -> FluxTemplate:
    """Not `filled` yet; equal for every edit of the same pixels and noise seed."""
    clean = image.mode()
    noise = template_noise(clean.shape, noise_seed, clean.dtype)
    return FluxTemplate(pack_latents(clean), pack_latents(noise), None)
