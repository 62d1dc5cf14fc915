"""Between the VAE's latents and those that the denoiser takes."""

from __future__ import annotations

from torch import Tensor

from maskserve_core.models.facts import LatentSpace


def to_model(latents: Tensor, space: LatentSpace) -> Tensor:
    """The VAE's latents […, C, h, w] as the denoiser takes them."""
    return (latents - _each(space.shift, latents)) * _each(space.scale, latents)


def to_vae(latents: Tensor, space: LatentSpace) -> Tensor:
    """The denoiser's latents […, C, h, w] as the VAE decodes them."""
    return latents / _each(space.scale, latents) + _each(space.shift, latents)


def _each(values: tuple[float, ...], like: Tensor) -> float | Tensor:
    """A number for all channels stays a number: as a tensor in half precision it would be rounded
    once more than in the pipelines.
    """
    return values[0] if len(values) == 1 else like.new_tensor(values)[:, None, None]
