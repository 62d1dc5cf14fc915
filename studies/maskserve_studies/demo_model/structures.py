"""Scenes whose empty region is crossed by a structure that must continue from both sides.

Stripes keep their phase, a bar passes behind the region, and a gradient has a corner. Numpy and
Pillow only, like `scenes.py`.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from maskserve_benchmarks.demo_model.palette import COLOURS
from maskserve_benchmarks.demo_model.scenes import (
    Edit,
    Float,
    Mask,
    Scene,
    make_mask,
    mix,
    place,
    quiet_colour,
    to_bytes,
)

STRUCTURES: Final = ("stripes", "bar", "corner")
_HELD_OUT_SEED: Final = 9_000_000


def make_structure(rng: np.random.Generator, size: tuple[int, int], structure: str) -> Scene:
    """Draw a scene of `size` (height, width) with one of STRUCTURES through its region."""
    mask = make_mask(rng, size)
    picture = _DRAW[structure](rng, mask)
    return Scene(to_bytes(picture), mask, picture)


def structure_edits(structure: str, n: int = 32, size: tuple[int, int] = (128, 128)) -> list[Edit]:
    """Return the first `n` of a fixed list of edits without a prompt that training never draws."""
    edits = []
    for i in range(n):
        rng = np.random.default_rng([_HELD_OUT_SEED, STRUCTURES.index(structure), i])
        scene = make_structure(rng, size, structure)
        edits.append(Edit(scene.source, scene.mask, "", None, None, scene.source))
    return edits


def _stripes(rng: np.random.Generator, mask: Mask) -> Float:
    """Draw hard stripes of two quiet colours, 9..24 pixels a period at 128 x 128."""
    across, side = _across(rng, mask), math.sqrt(mask.size)
    period = rng.uniform(9, 24) * side / 128
    wave = np.sin(2 * math.pi * (across / period + rng.uniform()))
    a, b = _two_tones(rng)
    return mix(a, b, np.clip(wave * period / 6, -0.5, 0.5) + 0.5)


def _bar(rng: np.random.Generator, mask: Mask) -> Float:
    """Draw a bar of a palette colour, or a quiet one, on a plain ground through the region."""
    across, side = _across(rng, mask), math.sqrt(mask.size)
    half = rng.uniform(3.5, 9) * side / 128
    a, b = _two_tones(rng)
    if rng.random() < 0.5:
        b = np.asarray(COLOURS[str(rng.choice(list(COLOURS)))], np.float32)
    return mix(a, b, np.clip(half - np.abs(across) + 0.5, 0, 1))


def _corner(rng: np.random.Generator, mask: Mask) -> Float:
    """Draw two opposed gradients that meet in an edge through the region; the edge fades along its
    length.
    """
    across, along = _across(rng, mask), _across(rng, mask)
    a, b = _two_tones(rng)
    ramp = 0.4 * (along - along.min()) / max(float(np.ptp(along)), 1e-6)
    beyond = np.clip(across + 0.5, 0, 1)
    return mix(a, b, ramp + beyond * (1 - 2 * ramp))


def _across(rng: np.random.Generator, mask: Mask) -> Float:
    """Return the signed distance (H, W) in pixels from a line at any angle near the region's
    centre.
    """
    (x, y), radius = place(mask)
    angle, shift = rng.uniform(0, 2 * math.pi), rng.uniform(-0.5, 0.5) * radius
    ys, xs = np.mgrid[0 : mask.shape[0], 0 : mask.shape[1]].astype(np.float32) + 0.5
    return ((xs - x) * math.cos(angle) + (ys - y) * math.sin(angle) + shift).astype(np.float32)


def _two_tones(rng: np.random.Generator) -> tuple[Float, Float]:
    """Draw two quiet colours at least 60 apart (RGB distance)."""
    while True:
        a, b = quiet_colour(rng), quiet_colour(rng)
        if np.linalg.norm(a - b) >= 60:
            return a, b


_DRAW: Final = {"stripes": _stripes, "bar": _bar, "corner": _corner}
