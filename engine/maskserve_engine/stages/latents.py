"""Latents: between what a VAE gives of an image, a Gaussian, and what the denoiser takes; and the
noise, drawn from where the pipelines draw it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskserve_engine.base.job import EditJob
from maskserve_engine.spec.latents import LatentSpace


def to_model(latents: Tensor, space: LatentSpace) -> Tensor:
    """The VAE's latents […, C, h, w] as the denoiser takes them."""
    return (latents - _each(space.shift, space, latents)) * _each(space.scale, space, latents)


def to_vae(latents: Tensor, space: LatentSpace) -> Tensor:
    """The denoiser's latents […, C, h, w] as the VAE decodes them."""
    return latents / _each(space.scale, space, latents) + _each(space.shift, space, latents)


def _each(values: tuple[float, ...], space: LatentSpace, like: Tensor) -> float | Tensor:
    """A number for all channels stays a number: as a tensor in half precision it would be rounded
    once more than in the pipelines.
    """
    if len(values) == 1:
        return values[0]
    height, width = (side // space.patch for side in like.shape[-2:])
    return like.new_tensor(values).view(-1, space.patch, space.patch).tile(1, height, width)


class Posterior:
    """The VAE's Gaussian over an image's latents, scaled as the model expects.

    Args:
        moments: [2C, h, w], mean and log-variance.
        space: of the VAE.
        dtype: the model's; sampling happens in it, as in the pipeline.
    """

    def __init__(
        self, moments: NDArray[np.float32], space: LatentSpace, dtype: torch.dtype
    ) -> None:
        mean, logvar = torch.from_numpy(moments).to(dtype).chunk(2)
        self.mean, self.std = mean, torch.exp(0.5 * logvar.clamp(-30.0, 20.0))
        self.space = space

    def sample(self, generator: torch.Generator) -> Tensor:
        """[C, h, w]; draws C·h·w numbers from `generator`, with a leading batch axis."""
        noise = draw(self.mean.shape, generator, self.mean.dtype)
        return to_model(self.mean + self.std * noise, self.space)

    def mode(self) -> Tensor:
        return to_model(self.mean, self.space)


def draw(shape: torch.Size, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Normal noise [C, h, w] as diffusers' randn_tensor draws it for a batch of one."""
    return torch.randn((1, *shape), generator=generator, dtype=dtype)[0]


def template_noise(shape: torch.Size, seed: int, dtype: torch.dtype) -> Tensor:
    """[C, h, w] the noise that all edits of a template share."""
    return draw(shape, torch.Generator("cpu").manual_seed(seed), dtype)


def is_soft(edit_mask: NDArray[np.uint8]) -> bool:
    """Whether an edit mask has grey, as `mask_mode: strength` leaves it."""
    return bool(((edit_mask > 0) & (edit_mask < 255)).any())


def joins(after: int, steps: int) -> float:
    """The grey, as a share, from which a latent is part of the edit behind so many of its steps
    (differential diffusion, Levin and Fried 2023): what may change by g of 1 is so for the last g
    of them. White is from the start and black never; behind the last step it is as before it.
    """
    return max(steps - after, 1) / steps


def outside_seed(job: EditJob, outside_noise: str) -> int | None:
    """The seed of an edit's noise outside its mask; None: it is the edit's own there, too, as the
    pipeline has it.

    Args:
        job: the edit.
        outside_noise: `[model] outside_noise`. With `auto` an edit that may read its template, or
            stand beside one that does, has the template's.
    """
    request = job.request
    own = outside_noise == "edit" or (outside_noise == "auto" and request.settings.cache == "off")
    return None if own else request.template_noise_seed


def noise_outside(noise: Tensor, mask: Tensor, seed: int) -> Tensor:
    """An edit's noise under its mask, the template's elsewhere.

    So a base model's dense rows see the same picture round the mask as its cached rows do.

    Args:
        noise: [C, h, w] the edit's.
        mask: [1, h, w] of latents, 1 = edit.
        seed: of the template's noise.
    """
    return torch.where(mask > 0, noise, template_noise(noise.shape, seed, noise.dtype))
