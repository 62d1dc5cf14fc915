"""Edits with masks as people draw them, over textures on which every error shows.

Masks: thin lines, several pieces, a strip along one side of the picture, a dot, and nearly
everything. Textures: stars, rings, hard stripes. Every second prompt is empty; the others name an
object. Such masks may have no room for it, so only likeness is judged.

Numpy and Pillow only, like `scenes.py`.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from PIL import Image, ImageDraw

from maskserve_benchmarks.demo_model.palette import COLOURS, SHAPES, coverage
from maskserve_benchmarks.demo_model.prompts import first_phrase
from maskserve_benchmarks.demo_model.scenes import Edit, Float, Mask, mix, quiet_colour, to_bytes

MASKS: Final = ("lines", "pieces", "strip", "dot", "most")
TEXTURES: Final = ("stars", "rings", "hard_stripes")
_HELD_OUT_SEED: Final = 10_000_000


def hard_edits(kind: str, n: int = 24, size: tuple[int, int] = (128, 128)) -> list[Edit]:
    """Return the first `n` of a fixed list of edits with one of MASKS; the edits cycle through
    TEXTURES.

    `size` is height, width. The target is the source, because the prompt is empty.
    """
    edits = []
    for i in range(n):
        rng = np.random.default_rng([_HELD_OUT_SEED, MASKS.index(kind), i])
        source = to_bytes(_TEXTURE[TEXTURES[i % len(TEXTURES)]](rng, size))
        prompt = ""
        if i % 2:
            prompt = first_phrase(str(rng.choice(list(COLOURS))), str(rng.choice(SHAPES)))
        edits.append(Edit(source, hard_mask(rng, size, kind), prompt, None, None, source))
    return edits


def hard_mask(rng: np.random.Generator, size: tuple[int, int], kind: str) -> Mask:
    """Draw one of MASKS for a picture of `size` (height, width)."""
    if kind not in MASKS:
        raise ValueError(f"mask: unknown kind {kind!r}; accepted: {', '.join(MASKS)}")
    height, width = size
    side = math.sqrt(height * width)
    image = Image.new("1", (width, height))
    draw = ImageDraw.Draw(image)

    def point() -> tuple[float, float]:
        return rng.uniform(0.08, 0.92) * width, rng.uniform(0.08, 0.92) * height

    def blob(radius: float) -> None:
        (x, y), aspect = point(), math.exp(rng.uniform(-0.3, 0.3))
        draw.ellipse(
            (x - radius * aspect, y - radius / aspect, x + radius * aspect, y + radius / aspect),
            fill=1,
        )

    if kind == "lines":
        for _ in range(rng.integers(1, 4)):
            points = [point() for _ in range(rng.integers(2, 5))]
            draw.line(points, fill=1, width=max(1, round(rng.uniform(0.015, 0.05) * side)))
    elif kind == "pieces":
        for _ in range(rng.integers(3, 7)):
            blob(rng.uniform(0.04, 0.1) * side)
    elif kind == "dot":
        blob(0.056 * side)  # about 1 % of the picture
    elif kind == "strip":
        deep = rng.uniform(0.08, 0.25)
        across, down = round(deep * width), round(deep * height)
        left, top, right, bottom = [
            (0, 0, width, down), (0, height - down, width, height),
            (0, 0, across, height), (width - across, 0, width, height),
        ][int(rng.integers(4))]  # fmt: skip
        draw.rectangle((left, top, right - 1, bottom - 1), fill=1)
    else:  # most: all but a window of about 10 % of the picture
        draw.rectangle((0, 0, width, height), fill=1)
        aspect = math.exp(rng.uniform(-0.5, 0.5))
        w, h = width * math.sqrt(0.1 * aspect), height * math.sqrt(0.1 / aspect)
        x, y = rng.uniform(0, width - w), rng.uniform(0, height - h)
        draw.rectangle((x, y, x + w - 1, y + h - 1), fill=0)
    return np.asarray(image, np.bool_)


def _stars(rng: np.random.Generator, size: tuple[int, int]) -> Float:
    """Draw stars of all colours on a quiet ground, one per cell of a grid."""
    picture = np.broadcast_to(quiet_colour(rng), (*size, 3)).astype(np.float32)
    cell = rng.uniform(0.14, 0.22) * math.sqrt(size[0] * size[1])
    for y in np.arange(cell / 2, size[0], cell):
        for x in np.arange(cell / 2, size[1], cell):
            rgb = np.asarray(COLOURS[str(rng.choice(list(COLOURS)))], np.float32)
            centre = (x + rng.uniform(-0.1, 0.1) * cell, y + rng.uniform(-0.1, 0.1) * cell)
            picture = mix(picture, rgb, coverage("star", centre, 0.42 * cell, size))
    return picture


def _rings(rng: np.random.Generator, size: tuple[int, int]) -> Float:
    """Draw concentric rings of two contrasting colours around a centre in the picture."""
    ys, xs = np.mgrid[0 : size[0], 0 : size[1]].astype(np.float32) + 0.5
    centre = rng.uniform(0.2, 0.8, 2) * size
    return _two_tone(rng, size, np.hypot(ys - centre[0], xs - centre[1]))


def _hard_stripes(rng: np.random.Generator, size: tuple[int, int]) -> Float:
    """Draw straight stripes of two contrasting colours at any angle."""
    ys, xs = np.mgrid[0 : size[0], 0 : size[1]].astype(np.float32) + 0.5
    angle = rng.uniform(0, math.pi)
    return _two_tone(rng, size, xs * math.cos(angle) + ys * math.sin(angle))


def _two_tone(rng: np.random.Generator, size: tuple[int, int], along: Float) -> Float:
    """Draw bands of equal width along `along` (H, W) pixels: dark and light, one of the two
    coloured.
    """
    period = rng.uniform(0.08, 0.2) * math.sqrt(size[0] * size[1])
    wave = np.sin(2 * math.pi * (along / period + rng.uniform()))
    light = np.asarray(COLOURS[str(rng.choice(list(COLOURS)))], np.float32)
    dark = np.full(3, rng.choice([20.0, 240.0]), np.float32)
    return mix(light, dark, np.clip(wave * period / 6, -0.5, 0.5) + 0.5)


_TEXTURE: Final = {"stars": _stars, "rings": _rings, "hard_stripes": _hard_stripes}
