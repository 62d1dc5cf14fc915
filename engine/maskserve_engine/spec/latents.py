"""The space of latents between a VAE and a denoiser, by the VAE's config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from maskserve_common.config import ConfigError
from maskserve_common.files.safetensors_header import BadHeader, header_of

_PLAIN = "AutoencoderKL"
"""The class of a VAE whose config.json names none."""
_TILE = 32
"""diffusers' default `sample_size`, for a config.json without one."""
_SIDE, _RGBA = 2, 4


@dataclass(frozen=True, slots=True)
class LatentSpace:
    """Latents as the denoiser takes them: (VAE's - shift) * scale."""

    pixels: int
    """Pixels per latent, along one side."""
    channels: int
    shift: tuple[float, ...] = (0.0,)
    """One number, or one for each channel; `scale` has as many."""
    scale: tuple[float, ...] = (1.0,)
    widths: tuple[int, ...] = ()
    """Channels of the VAE's layers, from full resolution down."""
    patch: int = 1
    """Side of the patches, in latents. Above 1, shift and scale are those of channels that are
    patches [C · patch · patch], a channel's values together.
    """
    vae: str = _PLAIN
    """Name of the VAE's class in diffusers."""
    frames: bool = False
    """Whether the VAE takes pictures as films of one frame: its tensors have one more axis."""
    alpha: bool = False
    """Whether its pictures have an alpha channel; source pictures are opaque."""
    unfolds: bool = False
    """Whether one latent of the VAE is such a patch: its channels become several latents."""
    tile: int = _TILE
    """Pixels along a tile's side, if the VAE takes large pictures in tiles."""

    @property
    def one_scale(self) -> bool:
        return len(self.shift) == len(self.scale) == 1


def _kl(vae: Mapping[str, Any]) -> LatentSpace:
    widths = tuple(int(width) for width in vae["block_out_channels"])
    side, scale = vae.get("sample_size"), float(vae.get("scaling_factor", 0.18215))
    mean, std = (vae.get(f"latents_{name}") for name in ("mean", "std"))
    return LatentSpace(
        pixels=2 ** (len(widths) - 1),
        channels=int(vae["latent_channels"]),
        shift=tuple(map(float, mean)) if mean else (float(vae.get("shift_factor") or 0.0),),
        scale=tuple(scale / float(value) for value in std) if std else (scale,),
        widths=widths,
        tile=int(side[0] if isinstance(side, list) else side or _TILE),
    )


def _qwen_image(vae: Mapping[str, Any]) -> LatentSpace:
    return LatentSpace(
        pixels=2 ** len(vae["temperal_downsample"]),
        channels=int(vae["z_dim"]),
        shift=tuple(map(float, vae["latents_mean"])),
        scale=tuple(1.0 / float(value) for value in vae["latents_std"]),
        widths=tuple(int(vae["base_dim"]) * int(value) for value in vae["dim_mult"]),
        vae="AutoencoderKLQwenImage",
        frames=True,
        tile=256,
    )


def _qwen_image21(vae: Mapping[str, Any]) -> LatentSpace:
    """Read Qwen-Image 2.1's VAE: each latent, which is one token, is treated as a 2x2 patch of
    latents with a quarter of the channels each, as other models have them.
    """
    space = _qwen_image(vae)
    return replace(
        space,
        pixels=int(vae["scale_factor_spatial"]) // _SIDE,
        channels=space.channels // _SIDE**2,
        patch=_SIDE,
        vae="AutoencoderKLQwenImage21",
        alpha=int(vae["in_channels"]) == _RGBA,
        unfolds=True,
    )


def _wan(vae: Mapping[str, Any]) -> LatentSpace:
    """Read Wan's VAE, which is Qwen-Image's; one of other layers (Wan 2.2) is refused."""
    if vae.get("patch_size") or vae.get("is_residual"):
        raise ConfigError("[model] path: vae: patch_size, is_residual: not served; use Wan 2.1's")
    return replace(_qwen_image(vae), vae="AutoencoderKLWan")


_STATISTICS = ("bn.running_mean", "bn.running_var")
"""Weights of a VAE that hold the statistics of a batch norm over patches of latents."""


def with_statistics(space: LatentSpace, folder: Path, epsilon: float) -> LatentSpace:
    """Return the latent space of a VAE whose shift and scale are a batch norm's; 0 and 1 for a
    folder without weights.

    Args:
        space: latent space without the statistics.
        folder: folder of the VAE.
        epsilon: epsilon of the norm.

    Raises:
        ConfigError: its weights lack the statistics.
    """
    statistics: dict[str, np.ndarray[Any, np.dtype[np.float64]]] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files and not any(folder.glob("*.bin")):
        none = (0.0,) * (4 * space.channels)
        return replace(space, shift=none, scale=(1.0,) * len(none), patch=2)
    for file in files:
        try:
            tensors = header_of(file).tensors
        except (OSError, BadHeader) as error:
            raise ConfigError(f"[model] path: {file} {error}") from error
        for name in statistics.keys() ^ set(_STATISTICS) & tensors.keys():
            place = tensors[name]
            raw = np.fromfile(file, np.uint8, place.nbytes, offset=place.begin)
            if place.dtype == "BF16":  # the upper half of a float32
                statistics[name] = (raw.view("<u2").astype("<u4") << 16).view("<f4").astype(float)
            else:
                statistics[name] = raw.view({"F16": "<f2", "F32": "<f4"}[place.dtype]).astype(float)
    if len(statistics) < len(_STATISTICS):
        raise ConfigError(f"[model] path: {folder} has no {' and '.join(_STATISTICS)}")
    mean, variance = (statistics[name] for name in _STATISTICS)
    scale = 1.0 / np.sqrt(variance + epsilon)
    return replace(space, shift=tuple(mean.tolist()), scale=tuple(scale.tolist()), patch=2)


def _flux2(vae: Mapping[str, Any]) -> LatentSpace:
    return replace(_kl({**vae, "scaling_factor": 1.0}), vae="AutoencoderKLFlux2")


VAES: dict[str, Callable[[Mapping[str, Any]], LatentSpace]] = {
    _PLAIN: _kl,
    "AutoencoderKLQwenImage": _qwen_image,
    "AutoencoderKLQwenImage21": _qwen_image21,
    "AutoencoderKLFlux2": _flux2,
    "AutoencoderKLWan": _wan,
}
"""Readers of a config.json, by the VAE's class."""


def latent_space(vae: Mapping[str, Any]) -> LatentSpace:
    """Read a VAE's latent space from its config.json, with the class's defaults.

    Raises:
        ConfigError: the class is not known, or required values are missing.
    """
    name = vae.get("_class_name", _PLAIN)
    if name not in VAES:
        raise ConfigError(f"[model] path: vae: {name} is not served; served: {', '.join(VAES)}")
    try:
        return VAES[name](vae)
    except KeyError as error:
        raise ConfigError(f"[model] path: vae/config.json: {error.args[0]} is missing") from error
