"""LoRAs that a worker fuses into its weights at start, as `[model] fuse_loras` names them."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple

from maskserve_common.config import Config, ConfigError


class FusedLora(NamedTuple):
    path: Path
    """A file, or a folder of diffusers or PEFT."""
    scale: float


def fused_loras(config: Config) -> tuple[FusedLora, ...]:
    """Return the configured LoRAs, given as FILE or FILE:SCALE.

    Raises:
        ConfigError: a scale is not a number.
    """
    return tuple([_parse(text) for text in config.model.fuse_loras])


def fuse_error(path: Path, why: str) -> ConfigError:
    return ConfigError(f"[model] fuse_loras: {path} {why}")


def _parse(text: str) -> FusedLora:
    path, colon, scale = text.rpartition(":")
    if not colon or os.sep in scale:
        return FusedLora(Path(text), 1.0)
    try:
        value = float(scale)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise fuse_error(Path(path), f"{scale!r} is not a scale; use FILE or FILE:SCALE")
    return FusedLora(Path(path), value)
