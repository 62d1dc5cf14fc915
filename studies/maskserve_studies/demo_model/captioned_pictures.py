"""Pictures with captions: "a red star at the left and a blue circle at the right".

A caption names every object and, of one that is not in the middle, the side. Neither the caption
nor anything else says how the background looks. Numpy and Pillow only, like `scenes.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from maskserve_benchmarks.demo_model.palette import COLOURS, SHAPES
from maskserve_benchmarks.demo_model.scenes import (
    Picture,
    contrasting_colours_at,
    draw_background,
)
from maskserve_studies.demo_model.judge import judge
from maskserve_studies.demo_model.reference_edits import SIDES, ObjectScene, PlacedObject

RADII: Final = (16.0, 19.0)  # pixels of the circle around an object, whatever the picture's size
SHIFT: Final = 5.0  # pixels by which an object may be off its place
REACH: Final = 27.0  # pixels from a place to the edge of the square in which the judge looks
_HELD_OUT_SEED: Final = 9_500_000
_OPPOSITE: Final = {"left": "right", "right": "left", "top": "bottom", "bottom": "top"}


@dataclass(frozen=True)
class CaptionedPicture:
    """A picture and the caption that asks for it."""

    caption: str
    scene: ObjectScene
    sides: tuple[str | None, ...]
    """The side at which the caption puts each object; None: in the middle."""

    @property
    def picture(self) -> Picture:
        """The drawn picture."""
        return self.scene.drawn(self.scene.things)

    def shown_in(self, picture: Picture) -> bool:
        """Return whether `picture`, of any producer, has every object at its place."""
        return all(
            shows(picture, thing.colour, thing.shape, side)
            for thing, side in zip(self.scene.things, self.sides, strict=True)
        )


def shows(picture: Picture, colour: str, shape: str, side: str | None) -> bool:
    """Return whether a picture has this object at this side, or in the middle."""
    mask = np.zeros(picture.shape[:2], np.bool_)
    x, y = _place(side, mask.shape)
    left, top = (max(0, round(centre - REACH)) for centre in (x, y))
    mask[top : round(y + REACH), left : round(x + REACH)] = True
    return judge(picture, picture, mask).matches(colour, shape)


def is_held_out(colour: str, shape: str) -> bool:
    """Whether training shows no captioned picture with an object of this colour and shape."""
    return (list(COLOURS).index(colour) + SHAPES.index(shape)) % len(COLOURS) == len(SHAPES)


def draw_captioned_picture(
    rng: np.random.Generator, size: tuple[int, int], *, held_out: bool = False
) -> CaptionedPicture:
    """Draw a captioned picture of `size` (height, width).

    Args:
        rng: random generator for all draws.
        size: height and width of the picture.
        held_out: whether its objects are those that training does not show.
    """
    first = str(rng.choice(SIDES))
    layouts: list[list[str | None]] = [[None], [first], [first, _OPPOSITE[first]]]
    sides = layouts[int(rng.choice(len(layouts), p=[0.4, 0.2, 0.4]))]
    while True:
        kind = str(rng.choice(["gradient", "stripes"], p=[0.8, 0.2]))
        background, _ = draw_background(rng, kind, size)
        things = list[PlacedObject]()
        for side in sides:
            x, y = (float(at + rng.uniform(-SHIFT, SHIFT)) for at in _place(side, size))
            radius = float(rng.uniform(*RADII))
            pairs = [
                (colour, shape)
                for colour in contrasting_colours_at(background, (x, y), radius)
                for shape in SHAPES
                if is_held_out(colour, shape) == held_out
                and all(t.colour != colour and t.shape != shape for t in things)
            ]
            if pairs:
                colour, shape = pairs[int(rng.integers(len(pairs)))]
                things.append(PlacedObject(colour, shape, (x, y), radius))
        if len(things) == len(sides):
            break
    caption = " and ".join(
        f"a {thing.colour} {thing.shape}" + (f" at the {side}" if side else "")
        for thing, side in zip(things, sides, strict=True)
    )
    return CaptionedPicture(caption, ObjectScene(background, tuple(things)), tuple(sides))


def held_out_pictures(
    n: int, size: tuple[int, int] = (128, 128), *, held_out: bool = False
) -> Iterator[CaptionedPicture]:
    """Draw the first `n` of a fixed list that training never draws. With `held_out` training shows
    none of their objects either.
    """
    for i in range(n):
        rng = np.random.default_rng([_HELD_OUT_SEED, held_out, i])
        yield draw_captioned_picture(rng, size, held_out=held_out)


def _place(side: str | None, size: tuple[int, ...]) -> tuple[float, float]:
    """Where the caption puts an object: x and y, in the middle or a quarter from this side."""
    x, y = size[1] / 2, size[0] / 2
    if side in ("left", "right"):
        return (x / 2 if side == "left" else 1.5 * x), y
    if side in ("top", "bottom"):
        return x, (y / 2 if side == "top" else 1.5 * y)
    return x, y
