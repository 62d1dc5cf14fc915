"""Which pictures share a call of the VAE: pictures of one size, as many as is faster.

On a CPU they run one by one, because the maps of several evict each other from its caches (docs:
benchmarks.md, "Several pictures in one call"). One picture of 1024 x 1024 fills a GPU, which idles
between the kernels of small ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

from maskserve_common.config import StagesConfig

K = TypeVar("K", bound=Hashable)

_FULL = 1024 * 1024
"""Maximum pixels of one call; a larger picture runs alone."""


def shares_calls(config: StagesConfig, device: str) -> bool:
    """Return whether the VAE takes several pictures at once on a kind of device."""
    return config.vae_batches == "on" or (config.vae_batches == "auto" and device == "cuda")


def vae_batches(sizes: Mapping[K, tuple[int, int]]) -> dict[K, tuple[K, ...]]:
    """Return for each picture all pictures of its call, including itself, in the given order;
    `sizes` are [h, w] in pixels.
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
