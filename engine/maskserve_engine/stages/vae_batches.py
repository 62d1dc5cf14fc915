"""Which pictures go through the VAE in one call: those of one size, as many as pay.

On a CPU they go one by one: the maps of several push each other out of its caches (docs:
benchmarks.md, "Several pictures in one call"). A GPU is full with one picture of 1024 x 1024, and
idles between the kernels of small ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

from maskserve_common.config import StagesConfig

K = TypeVar("K", bound=Hashable)

_FULL = 1024 * 1024
"""Pixels of one call, at most; a larger picture has one of its own."""


def shares_calls(config: StagesConfig, device: str) -> bool:
    """Whether the VAE takes several pictures at once.

    Args:
        config: of the worker.
        device: its kind, where the VAE is.
    """
    return config.vae_batches == "on" or (config.vae_batches == "auto" and device == "cuda")


def vae_batches(sizes: Mapping[K, tuple[int, int]]) -> dict[K, tuple[K, ...]]:
    """Which pictures share a call.

    Args:
        sizes: of each picture, [h, w] in pixels.

    Returns:
        For each picture all that go with it, itself too, in the given order.
    """
    batches: dict[K, tuple[K, ...]] = {}
    filling: dict[tuple[int, int], list[K]] = {}
    for name, size in sizes.items():
        batch = filling.setdefault(size, [])
        if (len(batch) + 1) * size[0] * size[1] > _FULL:
            batch = filling[size] = []
        batch.append(name)
        batches |= dict.fromkeys(batch, tuple(batch))
    return batches
