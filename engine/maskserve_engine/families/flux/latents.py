"""Latents: drawn from a VAE posterior, packed into tokens and back."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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


class Posterior:
    """The VAE's Gaussian over an image's latents, scaled as the model expects.

    Args:
        moments: [2C, h, w], mean and log-variance.
        shift: the VAE's shift_factor.
        scale: the VAE's scaling_factor.
        dtype: the model's; sampling happens in it, as in the pipeline.
    """

    def __init__(
        self, moments: NDArray[np.float32], shift: float, scale: float, dtype: torch.dtype
    ) -> None:
        mean, logvar = torch.from_numpy(moments).to(dtype).chunk(2)
        self.mean, self.std = mean, torch.exp(0.5 * logvar.clamp(-30.0, 20.0))
        self.shift, self.scale = shift, scale

    def sample(self, generator: torch.Generator) -> Tensor:
        """[C, h, w]; draws C·h·w numbers from `generator`, with a leading batch axis."""
        noise = draw(self.mean.shape, generator, self.mean.dtype)
        return (self.mean + self.std * noise - self.shift) * self.scale

    def mode(self) -> Tensor:
        return (self.mean - self.shift) * self.scale


def draw(shape: torch.Size, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Normal noise [C, h, w] as diffusers' randn_tensor draws it for a batch of one."""
    return torch.randn((1, *shape), generator=generator, dtype=dtype)[0]
