"""The demo model's vocabulary: colours, shapes, and how a shape is drawn.

Numpy and Pillow only: the judge, the tests and the server's benchmarks draw with it too.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

COLOURS: Final[dict[str, tuple[int, int, int]]] = {
    "red": (222, 30, 36),
    "orange": (248, 134, 20),
    "yellow": (250, 228, 36),
    "green": (34, 168, 60),
    "cyan": (36, 206, 222),
    "blue": (32, 70, 222),
    "purple": (130, 44, 192),
    "pink": (252, 124, 190),
}
SHAPES: Final[tuple[str, ...]] = ("circle", "square", "triangle", "star", "heart", "cross")

_SUPERSAMPLE: Final = 4


def outline(shape: str) -> NDArray[np.float64]:
    """Return the corners of `shape` as (N, 2) x, y pairs (y down), all inside the unit circle."""
    if shape == "circle":
        angle = np.linspace(0, 2 * math.pi, 64, endpoint=False)
        return 0.88 * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    if shape == "square":
        return 0.7 * np.array([(-1.0, -1.0), (1, -1), (1, 1), (-1, 1)])
    if shape == "triangle":
        angle = math.pi * (np.array([0, 2, 4]) / 3 - 0.5)
        return np.stack([np.cos(angle), np.sin(angle)], axis=1)
    if shape == "star":
        angle = math.pi * (np.arange(10) / 5 - 0.5)
        radius = np.where(np.arange(10) % 2 == 0, 1.0, 0.42)
        return radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    if shape == "heart":
        t = np.linspace(0, 2 * math.pi, 64, endpoint=False)
        x = 16 * np.sin(t) ** 3
        y = -(13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t))
        return np.stack([x, y - 1.5], axis=1) / 17.5
    if shape == "cross":
        a, b = 0.94, 0.3
        return np.array(
            [(-b, -a), (b, -a), (b, -b), (a, -b), (a, b), (b, b),
             (b, a), (-b, a), (-b, b), (-a, b), (-a, -b), (-b, -b)]
        )  # fmt: skip
    raise ValueError(f"shape: unknown {shape!r}; accepted: {', '.join(SHAPES)}")


def coverage(
    shape: str,
    centre: tuple[float, float],
    radius: float,
    size: tuple[int, ...],
    turn: float = 0.0,
) -> NDArray[np.float32]:
    """Return the share of each pixel that a shape covers, antialiased: (H, W) float32 in 0..1.

    `centre` is x, y. `radius` is that of the circle around the shape. Both are in pixels. `size` is
    the height and width of the result. The shape is turned clockwise by `turn` radians.
    """
    height, width = size
    out = np.zeros((height, width), np.float32)
    left, top = math.floor(centre[0] - radius) - 1, math.floor(centre[1] - radius) - 1
    side = math.ceil(2 * radius) + 3
    patch = Image.new("L", (side * _SUPERSAMPLE, side * _SUPERSAMPLE))
    rotated = outline(shape) @ [[math.cos(turn), math.sin(turn)], [-math.sin(turn), math.cos(turn)]]
    corners = (rotated * radius + np.asarray(centre) - (left, top)) * _SUPERSAMPLE - 0.5
    ImageDraw.Draw(patch).polygon([(float(x), float(y)) for x, y in corners], fill=255)
    small = np.asarray(patch.resize((side, side), Image.Resampling.BOX), np.float32) / 255
    y0, y1 = max(top, 0), min(top + side, height)
    x0, x1 = max(left, 0), min(left + side, width)
    if y0 < y1 and x0 < x1:
        out[y0:y1, x0:x1] = small[y0 - top : y1 - top, x0 - left : x1 - left]
    return out
