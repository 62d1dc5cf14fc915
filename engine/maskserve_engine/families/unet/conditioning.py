"""Inpainting's extra channels, or the blend after each step, of a UNet row."""

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
    """Blend of base models and of grey masks: outside the mask, latents follow the noised source.
    Grey areas follow it until the edit takes them in (`latents.joins`).
    """

    mask: Tensor
    """[1, h, w] float32, 1 = edit."""
    clean: Tensor
    """[C, h, w] latents of the source."""
    noise: Tensor
    """[C, h, w] noise of the request."""
    soft: bool


@dataclass(frozen=True, slots=True)
class UnetStart:
    """A row's tensors before its first step, in the model's dtype."""

    latents: Tensor
    """[C, h, w]."""
    condition: Tensor | None
    """[1 + C, h, w] mask and masked image of inpainting models."""
    blend: UnetBlend | None
    """Set for base models, and for grey masks."""


def start_row(
    image: Posterior,
    masked: Posterior | None,
    edit_mask: NDArray[np.uint8],
    schedule: UnetSchedule,
    generator: torch.Generator,
    dtype: torch.dtype,
    outside_seed: int | None,
) -> UnetStart:
    """Prepare as StableDiffusionInpaintPipeline and StableDiffusionXLInpaintPipeline do.

    Draws, in this order: the image's sample if it is used, the noise, the masked image's sample.
    (Base models also draw the last and never use it.)

    Args:
        image: posterior of the source.
        masked: posterior of the source with the masked area blanked; None for base models.
        edit_mask: [H, W], above 0 = edit.
        schedule: schedule of the row.
        generator: generator with the edit's seed.
        dtype: dtype of the model.
        outside_seed: seed of the noise outside the mask; None: one noise for all.
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


def start_whole(
    image: Posterior | None,
    size: torch.Size,
    schedule: UnetSchedule,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> UnetStart:
    """Prepare latents of a size [C, h, w] as StableDiffusionImg2ImgPipeline and
    StableDiffusionXLImg2ImgPipeline do, which draw the image's sample, then the noise; without an
    image as StableDiffusionPipeline and StableDiffusionXLPipeline do.
    """
    clean = None if image is None else image.sample(generator).to(dtype)[None]
    noise = draw(size, generator, dtype)
    return UnetStart(schedule.start(clean, noise[None])[0], None, None)


@dataclass(frozen=True, slots=True)
class UnetInputs:
    start: UnetStart
    texts: tuple[Tensor, ...]
    """The prompt's tensors as the model takes them; for SDXL also pooled text and sizes."""
    negative: tuple[Tensor, ...] | None
    picture_keys: tuple[Tensor | None, Tensor | None] = (None, None)
    """[tokens, W] of the IP-Adapter's picture, for either prompt (`picture_tokens.PICTURE_KEYS`);
    None: there is none."""


@dataclass(frozen=True, slots=True)
class UnetTemplate:
    """The template's model inputs: priming runs on them, and cached tokens are fixed to them."""

    clean: Tensor
    """[C, h, w] posterior mode of the source."""
    noise: Tensor
    """[C, h, w] noise of the template."""
    condition: Tensor | None
    """[1 + C, h, w] of inpainting models: an empty mask and the unmasked image."""
    levels: NoiseLevels

    def latents_at(self, timestep: float) -> Tensor:
        """Return [C, h, w] latents, scaled for the model."""
        return self.levels.mixed(self.clean, self.noise, timestep)

    def at(self, timestep: float) -> Tensor:
        """Return [in_channels, h, w] model input."""
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
    """Return template inputs; equal for all edits of the same pixels and noise seed."""
    clean = image.mode().to(dtype)
    noise = template_noise(clean.shape, noise_seed, dtype)
    condition = torch.cat((torch.zeros_like(clean[:1]), clean)) if fill else None
    return UnetTemplate(clean, noise, condition, levels)
