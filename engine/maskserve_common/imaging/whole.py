"""The model's size of a picture without a mask, and a source brought to it.

    source ─ resize ─► scaled ─ cut ─► the model's size, which is the answer's
    source ─ resize ─► scaled ─ pad ─► the model's size; the answer has the size of `scaled` again

The size is the client's, or the one that a model's pipeline in diffusers chooses for the source.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from maskserve_common.config import LimitsConfig
from maskserve_common.errors import InvalidRequest
from maskserve_common.imaging.images import Size, check_size, model_size, resize

SizeRule = Literal["bounded", "preferred", "area", "covering", "cut", "padded"]
"""How a pipeline chooses the size for a source:

- `bounded`: the source's own, at most the native area (image-to-image pipelines)
- `preferred`: the nearest aspect ratio of a list (FluxKontextPipeline)
- `area`: the native area, in the source's aspect ratio (QwenImageEditPipeline, QwenImage21Pipeline)
- `covering`: the same, with sides rounded up (LongCatImageEditPipeline)
- `cut`: the source's own, at most the native area, without what exceeds the grid at its sides
  (Flux2KleinPipeline)
- `padded`: the source's own, at most the native area, with its reflection up to the grid (one
  reference of FLUX.3's pipelines, which take four times the area)
"""

_PREFERRED = (
    (672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184),
    (944, 1104), (1024, 1024), (1104, 944), (1184, 880), (1248, 832), (1328, 800), (1392, 752),
    (1456, 720), (1504, 688), (1568, 672),
)  # fmt: skip
"""diffusers' PREFERRED_KONTEXT_RESOLUTIONS (width, height), for a native side of 1024 pixels."""
_PREFERRED_SIDE = 1024
_PADDED_SIDES = (64, 4096)
"""Shortest and longest side of a padded picture (Flux3ImageProcessor)."""
_SMALLER = 0.995
"""Factor of a picture whose padded size is still too large."""


class PictureFit(NamedTuple):
    """How a source becomes the model's picture."""

    scaled: Size
    """(height, width) to which it is resized."""
    size: Size
    """(height, width) of the model's picture: the middle of the resized one, or around it."""
    rim: Literal["reflect", "symmetric"] = "reflect"
    """How `size` is filled around a smaller picture (np.pad)."""

    @property
    def answer_size(self) -> Size:
        """(height, width) of the answer, the middle of the model's picture."""
        height, width = map(min, self.scaled, self.size)
        return height, width

    def of(self, source: Image.Image) -> Image.Image:
        """Return a source as the model sees it."""
        scaled = resize(source, self.scaled)
        if self.scaled == self.size:
            return scaled
        if self.answer_size != self.size:
            margins = [
                (around // 2, around - around // 2)
                for around in (w - p for w, p in zip(self.size, self.scaled, strict=True))
            ]
            return Image.fromarray(np.pad(np.asarray(scaled), [*margins, (0, 0)], mode=self.rim))
        return Image.fromarray(middle(np.asarray(scaled), self.size))


def middle(pixels: npt.NDArray[np.uint8], size: Size) -> npt.NDArray[np.uint8]:
    """Return the middle (height, width) of a picture [H, W, channels], a view."""
    top, left = ((side - part) // 2 for side, part in zip(pixels.shape, size, strict=False))
    return pixels[top : top + size[0], left : left + size[1]]


def native_size(native: int, multiple: int) -> Size:
    """Return the (height, width) of a picture that has neither a source nor a size.

    Args:
        native: side in pixels of the square that the model was trained for.
        multiple: number of pixels that the model's sides are multiples of.
    """
    return model_size((native, native), native, multiple)


def fit_of(source: Size, rule: SizeRule, native: int, multiple: int) -> PictureFit:
    """Return how a model's pipeline fits a source of this (height, width); see `native_size`."""
    match rule:
        case "bounded":
            size = model_size(source, native, multiple)
            return PictureFit(size, size)
        case "preferred":
            size = _preferred(source, native, multiple)
            return PictureFit(size, size)
        case "area":
            size = _of_area(source, native, multiple, round)
            return PictureFit(size, size)
        case "covering":
            size = _of_area(source, native, multiple, math.ceil)
            return PictureFit(size, size)
        case "cut":
            return _cut(source, native, multiple)
        case "padded":
            return _padded(source, native, multiple)


def _preferred(source: Size, native: int, multiple: int) -> Size:
    ratio = source[1] / source[0]
    _, width, height = min((abs(ratio - w / h), w, h) for w, h in _PREFERRED)
    scaled = (side * native // _PREFERRED_SIDE for side in (height, width))
    high, wide = (_down(side, multiple) for side in scaled)
    return high, wide


def _of_area(source: Size, native: int, multiple: int, rounded: Callable[[float], int]) -> Size:
    ratio = source[1] / source[0]
    width = math.sqrt(native**2 * ratio)
    high, wide = (
        max(multiple, rounded(side / multiple) * multiple) for side in (width / ratio, width)
    )
    return high, wide


def _cut(source: Size, native: int, multiple: int) -> PictureFit:
    height, width = source
    if height * width > native**2:
        scale = math.sqrt(native**2 / (width * height))
        height, width = int(height * scale), int(width * scale)
    size = _down(height, multiple), _down(width, multiple)
    return PictureFit((max(height, size[0]), max(width, size[1])), size)


def _padded(source: Size, native: int, multiple: int) -> PictureFit:
    most = max(native, multiple) ** 2
    shortest, longest = (_down(side, multiple) for side in _PADDED_SIDES)
    shortest = min(shortest, _down(native, multiple))
    scale = min(1.0, math.sqrt(most / math.prod(source)), longest / max(source))
    while True:
        high, wide = (max(1, round(side * scale)) for side in source)
        rows, columns = (
            min(longest, max(shortest, -(-side // multiple) * multiple)) for side in (high, wide)
        )
        if rows * columns <= most:
            mirrored = min(high, wide) <= multiple
            fit = PictureFit((high, wide), (rows, columns))
            return fit._replace(rim="symmetric") if mirrored else fit
        scale *= _SMALLER


def _down(side: int, multiple: int) -> int:
    return max(multiple, side // multiple * multiple)


def check_answer_size(size: Size, native: int, multiple: int, limits: LimitsConfig) -> None:
    """Check the size that a client wants for a picture without a mask.

    Args:
        size: (height, width).
        native: side of the square whose area bounds the model's pictures (`[model]
            native_resolution`, or the model's own).
        multiple: number of pixels that the model's sides are multiples of.
        limits: `[limits]`, which bound every picture.

    Raises:
        InvalidRequest: naming SETTINGS.size.
    """
    check_size(size, "SETTINGS.size", limits)
    largest = max(native, multiple) ** 2
    if math.prod(size) > largest:
        height, width = model_size(size, native, multiple)
        raise InvalidRequest(
            "SETTINGS.size",
            f"is {size[1]}x{size[0]} = {math.prod(size)} pixels",
            f"up to {largest} pixels, the model's native area ({native}x{native}), such as "
            f"{width}x{height}",
        )
    if any(side % multiple for side in size):
        height, width = (max(multiple, round(side / multiple) * multiple) for side in size)
        if height * width > largest:
            height, width = model_size(size, native, multiple)
        raise InvalidRequest(
            "SETTINGS.size",
            f"is {size[1]}x{size[0]}, off the model's grid",
            f"multiples of {multiple} pixels; the nearest size is {width}x{height}",
        )
