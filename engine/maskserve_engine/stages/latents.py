"""Latents between VAE and denoiser, and noise drawn as the pipelines draw it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskserve_engine.base.job import EditJob
from maskserve_engine.spec.latents import LatentSpace


def to_model(latents: Tensor, space: LatentSpace) -> Tensor:
    """Scale the VAE's latents […, C, h, w] for the denoiser."""
    return (latents - _per_channel(space.shift, space, latents)) * _per_channel(
        space.scale, space, latents
    )


def to_vae(latents: Tensor, space: LatentSpace) -> Tensor:
    """Scale the denoiser's latents […, C, h, w] for the VAE."""
    return latents / _per_channel(space.scale, space, latents) + _per_channel(
        space.shift, space, latents
    )


def _per_channel(values: tuple[float, ...], space: LatentSpace, like: Tensor) -> float | Tensor:
    """Return the values by channel. One value for all channels stays a Python number: a
    half-precision tensor would be rounded once more than in the pipelines.
    """
    if len(values) == 1:
        return values[0]
    height, width = (side // space.patch for side in like.shape[-2:])
    return like.new_tensor(values).view(-1, space.patch, space.patch).tile(1, height, width)


class Posterior:
    """The VAE's Gaussian over an image's latents, scaled for the denoiser.

    Args:
        moments: [2C, h, w], mean and log-variance.
        space: latent space of the VAE.
        dtype: dtype of the model, in which samples are drawn, as in the pipeline.
    """

    def __init__(
        self, moments: NDArray[np.float32], space: LatentSpace, dtype: torch.dtype
    ) -> None:
        mean, logvar = torch.from_numpy(moments).to(dtype).chunk(2)
        self.mean, self.std = mean, torch.exp(0.5 * logvar.clamp(-30.0, 20.0))
        self.space = space

    def sample(self, generator: torch.Generator) -> Tensor:
        """Return [C, h, w]; draws C·h·w numbers from `generator`, with a leading batch axis."""
        noise = draw(self.mean.shape, generator, self.mean.dtype)
        return to_model(self.mean + self.std * noise, self.space)

    def mode(self) -> Tensor:
        return to_model(self.mean, self.space)


def draw(shape: torch.Size, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Return normal noise [C, h, w], as diffusers' randn_tensor draws it for a batch of one."""
    return torch.randn((1, *shape), generator=generator, dtype=dtype)[0]


def template_noise(shape: torch.Size, seed: int, dtype: torch.dtype) -> Tensor:
    """Return [C, h, w] noise that all edits of a template share."""
    return draw(shape, torch.Generator("cpu").manual_seed(seed), dtype)


def is_soft(edit_mask: NDArray[np.uint8]) -> bool:
    """Return whether an edit mask has grey, as with `mask_mode: strength`."""
    return bool(((edit_mask > 0) & (edit_mask < 255)).any())


def joins(after: int, steps: int) -> float:
    """Return the mask strength from which a latent belongs to the edit after `after` steps
    (differential diffusion, Levin and Fried 2023): strength g is edited in the last g of the steps.
    White is edited from the start and black never; after the last step the value stays.
    """
    return max(steps - after, 1) / steps


def outside_seed(job: EditJob, outside_noise: str) -> int | None:
    """Return the seed of an edit's noise outside its mask; None: the edit's own noise, as in the
    pipeline.

    Args:
        job: the edit.
        outside_noise: `[model] outside_noise`. With `auto`, edits that may read their template,
            or share a batch with one that does, use the template's.
    """
    request = job.request
    own_noise = outside_noise == "edit" or (
        outside_noise == "auto" and request.settings.cache == "off"
    )
    return None if own_noise else request.template_noise_seed


def noise_outside(noise: Tensor, mask: Tensor, seed: int) -> Tensor:
    """Replace an edit's noise outside its mask by the template's, so that a base model's dense rows
    see the same surroundings as its cached rows.

    Args:
        noise: [C, h, w] of the edit.
        mask: [1, h, w] of latents, 1 = edit.
        seed: seed of the template's noise.
    """
    return torch.where(mask > 0, noise, template_noise(noise.shape, seed, noise.dtype))
