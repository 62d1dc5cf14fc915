"""Edits whose control picture shows the place, size and angle of the object.

The demo model alone puts an object upright into the middle of the mask, as large as fits. The
ControlNet `outline` makes it follow the outline of the control picture: white on black, of the
source's size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from maskserve_benchmarks.demo_model.palette import COLOURS, SHAPES, coverage
from maskserve_benchmarks.demo_model.scenes import (
    Edit,
    Mask,
    Picture,
    contrasting_colours_at,
    fill,
    make_scene,
    place,
    to_bytes,
)

LINE: Final = 3.0  # pixels of an outline's width
ENOUGH_IOU: Final = 0.7
_SIZES: Final = (0.55, 0.9)  # shares of the radius that the model would choose by itself
_LEAST_RADIUS: Final = 12.0  # pixels: three latents
_MOST_ALIKE: Final = 0.45  # highest IoU with the object that the model draws by itself
_HELD_OUT_SEED: Final = 7_200_000


@dataclass(frozen=True)
class Drawn:
    """A shape to draw."""

    shape: str
    centre: tuple[float, float]
    radius: float
    angle: float
    """Radians, clockwise."""

    def covers(self, size: tuple[int, ...]) -> Mask:
        """Return the pixels that it covers, (H, W)."""
        return coverage(self.shape, self.centre, self.radius, size, self.angle) > 0.5

    def picture(self, size: tuple[int, ...]) -> Picture:
        """Return its outline, white on black: (H, W, 3)."""
        line = coverage(self.shape, self.centre, self.radius, size, self.angle) - coverage(
            self.shape, self.centre, self.radius - LINE, size, self.angle
        )
        return np.repeat(to_bytes(255 * line[..., None].astype(np.float32)), 3, axis=2)


@dataclass(frozen=True)
class OutlinedEdit:
    """An edit with its control picture."""

    edit: Edit
    drawn: Drawn | None
    """None: nothing is drawn and the picture is black."""

    @property
    def control(self) -> Picture:
        """Return the control picture, (H, W, 3)."""
        if self.drawn is None:
            return np.zeros_like(self.edit.source)
        return self.drawn.picture(self.edit.mask.shape)


def draw_outlined(
    rng: np.random.Generator, size: tuple[int, int], *, held_out: bool = False
) -> OutlinedEdit:
    """Draw an edit of `size` (height, width) that the model alone would answer differently."""
    while True:
        scene = make_scene(rng, size, held_out=held_out)
        drawn = _draw_place(rng, scene.mask, str(rng.choice(SHAPES)))
        if drawn is None:
            continue
        colours = contrasting_colours_at(scene.background, drawn.centre, drawn.radius)
        if not colours:
            continue
        colour = str(rng.choice(colours))
        alpha = coverage(drawn.shape, drawn.centre, drawn.radius, size, drawn.angle)[..., None]
        rgb = np.asarray(COLOURS[colour], np.float32)
        answer = to_bytes((scene.background * (1 - alpha) + rgb * alpha).astype(np.float32))
        prompt = f"a {colour} {drawn.shape}"
        return OutlinedEdit(
            Edit(scene.source, scene.mask, prompt, colour, drawn.shape, answer), drawn
        )


def _draw_place(rng: np.random.Generator, mask: Mask, shape: str) -> Drawn | None:
    """Find a place inside the mask, away from where the model puts an object; None if there is
    none.
    """
    middle, most = place(mask)
    default_cover = coverage(shape, middle, most, mask.shape) > 0.5
    ys, xs = np.nonzero(mask)
    for _ in range(12):
        radius = max(_LEAST_RADIUS, float(rng.uniform(*_SIZES)) * most)
        pixel = int(rng.integers(len(ys)))
        centre = (float(xs[pixel]) + 0.5, float(ys[pixel]) + 0.5)
        drawn = Drawn(shape, centre, radius, float(rng.uniform(0, 2 * math.pi)))
        covers = drawn.covers(mask.shape)
        whole = covers.sum() > 0.98 * _area(shape, radius)
        if whole and not (covers & ~mask).any() and iou(covers, default_cover) < _MOST_ALIKE:
            return drawn
    return None


def _area(shape: str, radius: float) -> float:
    side = math.ceil(2 * radius) + 4
    return float(coverage(shape, (side / 2, side / 2), radius, (side, side)).sum())


def outline_iou(edited: Picture, outlined: OutlinedEdit) -> float:
    """Return the IoU of the pixels painted in the colour with the drawn shape."""
    edit = outlined.edit
    assert outlined.drawn is not None
    assert edit.colour is not None
    picture = edited.astype(np.float32)
    painted = np.linalg.norm(picture - np.asarray(COLOURS[edit.colour], np.float32), axis=2)
    behind = np.linalg.norm(picture - fill(edit.source, edit.mask), axis=2)
    return iou(edit.mask & (painted < behind), outlined.drawn.covers(edit.mask.shape))


def iou(one: Mask, other: Mask) -> float:
    """Return the intersection over union."""
    union = int((one | other).sum())
    return float((one & other).sum()) / union if union else 1.0


def outlined_edits(n: int, size: tuple[int, int] = (128, 128)) -> list[OutlinedEdit]:
    """Return the first `n` of a fixed list of edits that training never draws."""
    return [
        draw_outlined(np.random.default_rng([_HELD_OUT_SEED, i]), size, held_out=True)
        for i in range(n)
    ]
