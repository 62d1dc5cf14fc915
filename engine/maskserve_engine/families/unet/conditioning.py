"""What an edit adds to a UNet row: inpainting's extra channels, or the blend after each step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from maskserve_engine.families.unet.sampler import NoiseLevels, UnetSchedule
from maskserve_engine.stages.latents import Posterior, draw, is_soft, noise_outside, template_noise


@dataclass(frozen=True, slots=True)
class UnetBlend:
    """Base models, and masks with grey: outside the mask, latents follow the noised source. So they
    do under grey, until the edit takes them in (`latents.joins`).
    """

    mask: Tensor
    """[1, h, w] float32, 1 = edit."""
    clean: Tensor
    """[C, h, w] source latents."""
    noise: Tensor
    """[C, h, w] the request's noise."""
    soft: bool
    """Whether the mask has grey."""


@dataclass(frozen=True, slots=True)
class UnetStart:
    """A row's tensors before its first step, in the model's dtype."""

    latents: Tensor
    """[C, h, w]"""
    condition: Tensor | None
    """[1 + C, h, w] mask and masked image of inpainting models."""
    blend: UnetBlend | None
    """Of base models, and of masks with grey."""


def start_row(
    image: Posterior,
    masked: Posterior | None,
    edit_mask: NDArray[np.uint8],
    schedule: UnetSchedule,
    generator: torch.Generator,
    dtype: torch.dtype,
    outside_seed: int | None,
) -> UnetStart:
    """The preparation of StableDiffusionInpaintPipeline and StableDiffusionXLInpaintPipeline.

    Draws, in their order: the image's sample where it is used, the noise, the masked image's
    sample. (Base models draw the last one too and never use it.)

    Args:
        image: of the source.
        masked: of the source with the masked area blanked; None for base models.
        edit_mask: [H, W], above 0 = edit.
        schedule: the row's.
        generator: of the edit's seed.
        dtype: of the model.
        outside_seed: of the noise outside the mask; None: it is the edit's, too.
    """
    clean = None
    if masked is None or not schedule.whole:
        clean = image.sample(generator).to(dtype)
    noise = draw(image.mean.shape, generator, dtype)
    strength = torch.from_numpy(edit_mask).float()[None, None] / 255
    mask = F.interpolate((strength > 0).to(dtype), size=noise.shape[1:])[0]
    soft = is_soft(edit_mask)  # diffusers knows none, and takes one number of each latent's
    strength = F.adaptive_max_pool2d(strength, noise.shape[1:])[0] if soft else mask.float()
    if outside_seed is not None:
        noise = noise_outside(noise, mask, outside_seed)
    latents = schedule.start(None if clean is None else clean[None], noise[None])[0]
    if masked is None:
        assert clean is not None
        return UnetStart(latents, None, UnetBlend(strength, clean, noise, soft))
    blend = None
    if soft:
        source = image.mode().to(dtype) if clean is None else clean
        blend = UnetBlend(strength, source, noise, soft)
    return UnetStart(latents, torch.cat((mask, masked.sample(generator).to(dtype))), blend)


@dataclass(frozen=True, slots=True)
class UnetInputs:
    """What a row begins with."""

    start: UnetStart
    texts: tuple[Tensor, ...]
    """Of the prompt, as the model takes them; for SDXL pooled and sizes, too."""
    negative: tuple[Tensor, ...] | None


@dataclass(frozen=True, slots=True)
class UnetTemplate:
    """The template's own inputs: what priming runs on and inactive tokens are pinned to."""

    clean: Tensor
    """[C, h, w] posterior mode of the source."""
    noise: Tensor
    """[C, h, w] the template's own noise."""
    condition: Tensor | None
    """[1 + C, h, w]: for inpainting models an empty mask and the unmasked image."""
    levels: NoiseLevels

    def latents_at(self, timestep: float) -> Tensor:
        """[C, h, w] as the model takes them."""
        return self.levels.mixed(self.clean, self.noise, timestep)

    def at(self, timestep: float) -> Tensor:
        """[in_channels, h, w] model input."""
        latents = self.latents_at(timestep)
        return latents if self.condition is None else torch.cat((latents, self.condition))


def template_inputs(
    image: Posterior,
    noise_seed: int,
    levels: NoiseLevels,
    dtype: torch.dtype,
    *,
    fill: bool,
) -> UnetTemplate:
    """The template's inputs; equal for every edit of the same pixels and noise seed."""
    clean = image.mode().to(dtype)
    noise = template_noise(clean.shape, noise_seed, dtype)
    condition = torch.cat((torch.zeros_like(clean[:1]), clean)) if fill else None
    return UnetTemplate(clean, noise, condition, levels)
