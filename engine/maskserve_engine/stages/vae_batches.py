"""Which pictures share a call of the VAE: pictures of one size, as many as is faster.

On a CPU they run one by one, because the maps of several evict each other from its caches (docs:
benchmarks.md, "Several pictures in one call"). One picture of 1024 x 1024 fills a GPU, which idles
between the kernels of small ones. A source and its masked picture share a call of the encoder at
any size for which the device has memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

from maskserve_common.config import StagesConfig

K = TypeVar("K", bound=Hashable)

FULL = 1024 * 1024
"""Pixels that fill a GPU."""


def shares_calls(config: StagesConfig, device: str) -> bool:
    """Return whether the VAE takes several pictures at once on a kind of device."""
    return config.vae_batches == "on" or (config.vae_batches == "auto" and device == "cuda")


def vae_batches(sizes: Mapping[K, tuple[int, int]], most: int = FULL) -> dict[K, tuple[K, ...]]:
    """Return for each picture all pictures of its call, including itself, in the given order.

    Args:
        sizes: [h, w] in pixels.
        most: maximum pixels of one call; a larger picture runs alone.
    """
    batches: dict[K, tuple[K, ...]] = {}
    filling: dict[tuple[int, int], list[K]] = {}
    for name, size in sizes.items():
        batch = filling.setdefault(size, [])
        if (len(batch) + 1) * size[0] * size[1] > most:
            batch = filling[size] = []
        batch.append(name)
        batches |= dict.fromkeys(batch, tuple(batch))
    return batches
