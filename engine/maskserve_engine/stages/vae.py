"""The VAE of a model folder, of any class: loading, calls, and tiling of large pictures by
diffusers' `enable_tiling`.

A picture with a side above a tile's is cut into tiles, which overlap by a quarter and are blended.
diffusers' `enable_slicing`, which splits batches, is not used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskserve_common.config import Config, Stage
from maskserve_common.config_file import read_json
from maskserve_engine.spec.latents import LatentSpace
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_engine.stages.loader import dtype_of, load_part

_WHOLE = 1536
"""Native size up to which pictures are not tiled by default."""


def load_vae(config: Config, spec: ModelSpec, stage: Stage = "encoder") -> Any:
    """Load the VAE of the model folder for a stage. Raises ConfigError if it cannot be loaded."""
    import diffusers  # a process first excludes libraries that it does not use

    vae = load_part(config, "vae", getattr(diffusers, spec.latents.vae))
    if in_tiles(config, spec):
        vae.enable_tiling()
    if spec.latents.frames:
        _cut_to_one_frame(vae)
    else:
        vae.to(memory_format=torch.channels_last)  # as oneDNN and tensor cores take their maps
    dtype = vae_dtype(config, spec, stage)
    return vae if vae.dtype == dtype else vae.to(dtype)


def _cut_to_one_frame(vae: Any) -> None:
    """Leave the frames before a picture, which are zeros, out of a VAE's causal convolutions: two
    thirds of their products. No map is kept for a next frame.
    """
    vae.clear_cache = lambda: None
    vae._feat_map = vae._enc_feat_map = None
    films: list[Any] = [module for module in vae.modules() if isinstance(module, nn.Conv3d)]
    for conv in films:
        *sides, before, _ = conv._padding
        conv.weight = nn.Parameter(conv.weight[:, :, before:].contiguous(), requires_grad=False)
        conv._padding = (*sides, 0, 0)


def vae_dtype(config: Config, spec: ModelSpec, stage: Stage) -> torch.dtype:
    """Return the dtype in which a stage runs the VAE: as in diffusers' pipelines float32 where in
    half precision it overflows, as its folder says.
    """
    dtype, file = dtype_of(config), Path(config.model.path) / "vae" / "config.json"
    overflows = spec.micro_conditioning if stage == "encoder" else dtype == torch.float16
    if not overflows or spec.latents.vae != "AutoencoderKL":
        return dtype
    return torch.float32 if read_json(file).get("force_upcast", True) else dtype


def moments_of(vae: Any, images: Tensor, space: LatentSpace) -> Tensor:
    """Return [B, 2C, h, w] mean and log-variance of images [B, 3, H, W] in [-1, 1]."""
    if not space.frames:
        parameters: Tensor = vae.encode(images).latent_dist.parameters
        return parameters
    if space.alpha:
        images = F.pad(images, (0, 0, 0, 0, 0, 1), value=1.0)
    parameters = vae.encode(images[:, :, None]).latent_dist.parameters[:, :, 0]
    return F.pixel_shuffle(parameters, space.patch) if space.unfolds else parameters


def images_of(vae: Any, latents: Tensor, space: LatentSpace) -> Tensor:
    """Return [B, 3, H, W] in [-1, 1], or [B, 4, H, W] with alpha, from the VAE's latents [B, C, h,
    w].
    """
    if not space.frames:
        images: Tensor = vae.decode(latents).sample
        return images
    if space.unfolds:
        latents = F.pixel_unshuffle(latents, space.patch)
    return vae.decode(latents[:, :, None]).sample[:, :, 0]


def in_tiles(config: Config, spec: ModelSpec) -> bool:
    """Return whether a worker's VAE tiles large pictures."""
    vae_tiles = config.stages.vae_tiles
    return vae_tiles == "on" or (vae_tiles == "auto" and spec.native_resolution > _WHOLE)


def is_tiled(vae: Any, size: tuple[int, int], space: LatentSpace) -> bool:
    """Return whether a VAE tiles latents of this size [h, w], and their picture."""
    return bool(vae.use_tiling and max(size) * space.pixels > space.tile)
