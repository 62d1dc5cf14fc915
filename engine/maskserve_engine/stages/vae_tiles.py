"""The VAE, and whether it takes large pictures in tiles: diffusers' own `enable_tiling`.

A picture with a side above the VAE's `sample_size` is cut into tiles of that side, which overlap by
a quarter and are blended. diffusers' `enable_slicing` takes the pictures of a batch one by one;
here they always come alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from maskserve_core.config import Config
from maskserve_core.models.facts import ModelFacts, read_json
from maskserve_engine.stages.loader import load_part

_WHOLE = 1536
"""Native size up to which pictures are taken whole if nothing else is asked for."""
_SAMPLE_SIZE = 32
"""diffusers' own, where a VAE's config.json names none."""


def load_vae(config: Config, facts: ModelFacts) -> Any:
    """AutoencoderKL of the model folder.

    Raises:
        ConfigError: it cannot be loaded.
    """
    from diffusers import AutoencoderKL

    vae = load_part(config, "vae", AutoencoderKL)
    if in_tiles(config, facts):
        vae.enable_tiling()
    return vae


def in_tiles(config: Config, facts: ModelFacts) -> bool:
    """Whether a worker's VAE takes large pictures in tiles."""
    asked = config.stages.vae_tiles
    return asked == "on" or (asked == "auto" and facts.native_resolution > _WHOLE)


def tile_side(config: Config) -> int:
    """Of a tile, in pixels."""
    size = read_json(Path(config.model.path) / "vae" / "config.json").get("sample_size")
    return int(size[0] if isinstance(size, list) else size or _SAMPLE_SIZE)


def is_tiled(vae: Any, size: tuple[int, int]) -> bool:
    """Whether a VAE takes latents of this size [h, w], or their picture, in tiles."""
    return bool(vae.use_tiling and max(size) > vae.tile_latent_min_size)
