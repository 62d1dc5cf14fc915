"""Scenes of several objects, and the name of the object to find.

Numpy and Pillow only: benchmarks and tests draw the same scenes as the judge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from maskserve_benchmarks.demo_model.palette import COLOURS, SHAPES, coverage
from maskserve_benchmarks.demo_model.scenes import (
    MIN_CONTRAST,
    Mask,
    Picture,
    draw_background,
    to_bytes,
)
from maskserve_studies.demo_model.looks import HOLE

_HELD_OUT_SEED: Final = 7_300_000
_HOLLOW: Final = 0.25  # share of drawn objects that are outlines, as the LoRA `hollow` paints them
_LEAST_DISTANCE: Final = (
    1.1  # least distance between two objects, as a multiple of the sum of their radii
)


@dataclass(frozen=True)
class Thing:
    """One object of a scene."""

    colour: str
    shape: str
    covers: Mask
    """Its pixels, (H, W)."""


@dataclass(frozen=True)
class NamedScene:
    """A picture and all objects in it."""

    picture: Picture
    things: tuple[Thing, ...]

    def mask(self, colour: str, shape: str) -> Mask:
        """Return the pixels of every "`colour` `shape`", (H, W); all False if there is none."""
        covers = [x.covers for x in self.things if (x.colour, x.shape) == (colour, shape)]
        return np.logical_or.reduce([np.zeros(self.picture.shape[:2], np.bool_), *covers])


def draw_named(
    rng: np.random.Generator, size: tuple[int, int], *, held_out: bool = False
) -> NamedScene:
    """Draw one to five separate, clearly visible objects in a picture of `size` (height, width).
    `held_out` adds the photograph that training never sees.
    """
    side = float(np.sqrt(size[0] * size[1]))
    kind = str(rng.choice(["gradient", "noise", "stripes", "photo"], p=[0.25, 0.15, 0.2, 0.4]))
    picture, _ = draw_background(rng, kind, size, held_out=held_out)
    things: list[Thing] = []
    circles: list[tuple[float, float, float]] = []
    for _ in range(int(rng.integers(1, 6))):
        radius = float(side * np.exp(rng.uniform(np.log(0.07), np.log(0.3))))
        radius = min(radius, 0.48 * min(size))
        x = float(rng.uniform(radius, size[1] - radius))
        y = float(rng.uniform(radius, size[0] - radius))
        if any(np.hypot(x - u, y - v) < _LEAST_DISTANCE * (radius + r) for u, v, r in circles):
            continue
        colour, shape = str(rng.choice(list(COLOURS))), str(rng.choice(SHAPES))
        rgb = np.asarray(COLOURS[colour], np.float32)
        alpha = coverage(shape, (x, y), radius, size)
        if rng.random() < _HOLLOW:
            alpha = alpha - coverage(shape, (x, y), radius * HOLE, size)
        covered = alpha > 0.5
        behind = picture[covered]
        if len(behind) == 0 or np.linalg.norm(behind - rgb, axis=1).min() < MIN_CONTRAST:
            continue
        picture = (picture * (1 - alpha[..., None]) + rgb * alpha[..., None]).astype(np.float32)
        things.append(Thing(colour, shape, covered))
        circles.append((x, y, radius))
    return NamedScene(to_bytes(picture), tuple(things))


def held_out_scenes(n: int, size: tuple[int, int] = (128, 128)) -> list[tuple[NamedScene, Thing]]:
    """Return the first `n` of a fixed list of scenes that training never draws, each with the
    object to find. Colours and shapes take turns as far as the scenes have them.
    """
    out: list[tuple[NamedScene, Thing]] = []
    i = 0
    while len(out) < n:
        rng = np.random.default_rng([_HELD_OUT_SEED, i])
        scene, i = draw_named(rng, size, held_out=True), i + 1
        if scene.things:
            out.append((scene, scene.things[int(rng.integers(len(scene.things)))]))
    return out


def held_out_clicks(
    n: int, size: tuple[int, int] = (128, 128)
) -> list[tuple[NamedScene, Thing, tuple[int, int]]]:
    """Return the scenes and objects of `held_out_scenes`, each with a click: x, y of a pixel of the
    object.
    """
    clicks = []
    for i, (scene, thing) in enumerate(held_out_scenes(n, size)):
        rows, columns = np.nonzero(thing.covers)
        at = int(np.random.default_rng([_HELD_OUT_SEED, 1, i]).integers(len(rows)))
        clicks.append((scene, thing, (int(columns[at]), int(rows[at]))))
    return clicks


def disc(click: tuple[int, int], radius: float, size: tuple[int, int]) -> Mask:
    """Return a disc around a click (x, y), (H, W): an answer that ignores the picture."""
    rows, columns = np.ogrid[: size[0], : size[1]]
    x, y = click
    return np.asarray(np.hypot(columns - x, rows - y) <= radius, np.bool_)


def iou(predicted: Mask, target: Mask) -> float:
    """Return the intersection over union of two masks (H, W); 1 if both are empty."""
    union = int((predicted | target).sum())
    return 1.0 if union == 0 else int((predicted & target).sum()) / union
