"""The channels of an opened image: its grey or RGB, and its transparency."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from maskserve_core.imaging.containers import Container

Pixels: TypeAlias = npt.NDArray[np.uint8]


def split(image: Image.Image, container: Container) -> tuple[Image.Image, Image.Image | None]:
    """The image as L or RGB, and its transparency."""
    alpha: Image.Image | None = None
    if image.mode in ("LA", "RGBA"):
        alpha = image.getchannel("A")
    elif container.transparency:
        alpha = _keyed_alpha(image, container)
    if image.mode.startswith("I"):  # 16-bit grey
        return Image.fromarray(_high_byte(np.asarray(image))), alpha
    return as_mode(image, "L" if image.mode in ("1", "L", "LA") else "RGB"), alpha


def as_mode(image: Image.Image, mode: str) -> Image.Image:
    """`image` in `mode`; itself if it has that mode already, where convert() would copy it."""
    return image if image.mode == mode else image.convert(mode)


def _keyed_alpha(image: Image.Image, container: Container) -> Image.Image | None:
    """Transparency of a PNG without alpha channel: per palette entry, or one transparent colour.

    A transparent colour of 16-bit RGB is matched on the high bytes, all that is decoded of it.
    """
    chunk, depth = container.transparency, container.bit_depth
    if container.colour_type == 3:
        table = np.full(256, 255, np.uint8)
        table[: len(chunk)] = np.frombuffer(chunk[:256], np.uint8)
        return Image.fromarray(table[np.asarray(image)])
    key = np.frombuffer(chunk[: len(chunk) & ~1], ">u2").astype(np.int64)
    if container.colour_type == 0 and len(key) == 1:
        if depth == 16:
            opaque = np.asarray(image) != key[0]
        else:
            opaque = np.asarray(image.convert("L")) != key[0] * 255 // (2**depth - 1)
    elif container.colour_type == 2 and len(key) == 3:
        opaque = (np.asarray(image) != (key >> 8 if depth == 16 else key)).any(axis=2)
    else:
        return None
    return Image.fromarray(np.where(opaque, np.uint8(255), np.uint8(0)))


def _high_byte(samples: npt.NDArray[np.generic]) -> Pixels:
    high: Pixels = (samples.astype(np.uint16) >> 8).astype(np.uint8)
    return high
