"""Sizes: the source's, and the one the model works at.

Sizes are (height, width) in pixels, as array shapes are.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

Size = tuple[int, int]


def model_size(source_size: Size, native_resolution: int, multiple: int) -> Size:
    """The size at which the model sees an image of `source_size`.

    Keeps the aspect ratio, with an area of at most `native_resolution` squared and sides that are
    multiples of `multiple`. A smaller image is not enlarged, except up to the next multiple: an
    edit costs what its image holds, and a client that wants the native size can send it. Of the
    roundings that fit, the one nearest in aspect wins, then the larger one. Where one side of an
    extreme aspect ratio would vanish it stays at one multiple and the other gives way.
    """
    height, width = source_size
    limit = max(native_resolution, multiple) ** 2
    scale = min(1.0, math.sqrt(limit / (height * width)))
    candidates = [
        (h, w)
        for h in _roundings(height * scale, multiple)
        for w in _roundings(width * scale, multiple)
        if h * w <= limit
    ]
    if not candidates:
        # One side was raised to a whole multiple: the other must give way.
        short = multiple
        long = limit // (short * multiple) * multiple
        return (short, long) if height < width else (long, short)
    return min(
        candidates,
        key=lambda size: (abs(math.log(size[0] * width / (size[1] * height))), -size[0] * size[1]),
    )


def _roundings(side: float, multiple: int) -> tuple[int, ...]:
    # The tolerance keeps 1023.9999 from an exact scale at 1024, and 1024.0001 from 1040.
    down = max(multiple, math.floor(side / multiple + 1e-6) * multiple)
    up = max(multiple, math.ceil(side / multiple - 1e-6) * multiple)
    return (down,) if down == up else (down, up)


def resize(image: Image.Image, size: Size) -> Image.Image:
    """`image` at `size` by Lanczos; the same object when it already has that size."""
    height, width = size
    if image.size == (width, height):
        return image
    return image.resize((width, height), Image.Resampling.LANCZOS)


def resize_part(image: Image.Image, size: Size, box: tuple[int, int, int, int]) -> Image.Image:
    """The part `box` of `resize(image, size)`, without computing the rest.

    The same filter over the same pixels, those around the part included; Pillow chooses which
    axis it resamples first by the part's shape, so 8-bit rounding between the two may differ.

    Args:
        image: the whole image.
        size: (height, width) of the whole result.
        box: (left, top, right, bottom) of the part, in pixels of the result.
    """
    left, top, right, bottom = box
    if image.size == (size[1], size[0]):
        return Image.fromarray(np.asarray(image)[top:bottom, left:right])
    across, down = image.width / size[1], image.height / size[0]
    return image.resize(
        (right - left, bottom - top),
        Image.Resampling.LANCZOS,
        box=(left * across, top * down, right * across, bottom * down),
    )
