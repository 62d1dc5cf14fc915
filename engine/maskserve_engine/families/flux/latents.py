"""Latents packed into tokens and back."""

from __future__ import annotations

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
