"""Edits whose prompt refers to another object in the picture: "another one", "the same shape in
blue".

The other object is far from the mask, and the prompt names it only by relation. An editor that sees
only the mask's surroundings must guess.

Numpy and Pillow only, like `scenes.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from maskserve_benchmarks.demo_model.palette import COLOURS, SHAPES, coverage
from maskserve_benchmarks.demo_model.prompts import SAME, first_phrase
from maskserve_benchmarks.demo_model.scenes import (
    Edit,
    Mask,
    Scene,
    contrasting_colours,
    contrasting_colours_at,
    draw_background,
    emptied,
    finish,
    make_mask,
    mix,
    place,
    to_bytes,
)

RELATIONS: Final = ("same", "same_colour", "same_shape")
FAR: Final = 24.0  # pixels at 128 x 128 between the mask's rim and the other object: 3 tokens
_RADIUS: Final = (0.095, 0.14)  # radius of the other object, as a share of the picture's side
_TRIES: Final = 12  # places tried for the other object before another mask is drawn
_HELD_OUT_SEED: Final = 8_000_000


@dataclass(frozen=True)
class RelationalScene:
    """A scene with exactly one object, far from the mask."""

    scene: Scene
    colour: str
    shape: str
    centre: tuple[float, float]
    """x, y of the object, in pixels."""
    radius: float
    """Radius in pixels of the circle around it."""


@dataclass(frozen=True)
class Wish:
    """The object that a relational prompt asks for; SAME means "as the other object"."""

    prompt_words: tuple[str, str]
    """Colour and shape in the prompt's words."""
    colour: str
    """Colour of the right answer."""
    shape: str


def make_relational_scene(
    rng: np.random.Generator, size: tuple[int, int], *, held_out: bool = False
) -> RelationalScene:
    """Draw a scene of `size` (height, width); `held_out` adds the photo training never sees.

    The object's colour stands out where it is and behind the mask as well.
    """
    while True:
        mask = make_mask(rng, size)
        placement = _far_place(rng, mask)
        if placement is None:
            continue
        centre, radius = placement
        kind = rng.choice(["gradient", "noise", "stripes", "photo"], p=[0.3, 0.2, 0.2, 0.3])
        background, continues = draw_background(rng, str(kind), size, held_out=held_out)
        background = emptied(background, mask, continues=continues)
        colours = set(contrasting_colours_at(background, *place(mask)))
        colours &= set(contrasting_colours_at(background, centre, radius))
        if not colours:
            continue
        colour, shape = str(rng.choice(sorted(colours))), str(rng.choice(SHAPES))
        rgb = np.asarray(COLOURS[colour], np.float32)
        picture = mix(background, rgb, coverage(shape, centre, radius, size))
        scene = Scene(to_bytes(picture), mask, picture)
        return RelationalScene(scene, colour, shape, centre, radius)


def draw_wish(rng: np.random.Generator, scene: RelationalScene, relation: str) -> Wish | None:
    """Draw a wish of one of RELATIONS; None if only the object's own colour stands out in the
    mask.
    """
    if relation == "same":
        return Wish((SAME, SAME), scene.colour, scene.shape)
    if relation == "same_colour":
        shape = str(rng.choice([s for s in SHAPES if s != scene.shape]))
        return Wish((SAME, shape), scene.colour, shape)
    if relation == "same_shape":
        colours = [c for c in contrasting_colours(scene.scene) if c != scene.colour]
        if not colours:
            return None
        colour = str(rng.choice(colours))
        return Wish((colour, SAME), colour, scene.shape)
    raise ValueError(f"relation: unknown {relation!r}; accepted: {', '.join(RELATIONS)}")


def relational_edits(relation: str, n: int = 48, size: tuple[int, int] = (128, 128)) -> list[Edit]:
    """Return the first `n` of a fixed list of `relation` edits that training never draws."""
    edits = []
    for i in range(n):
        rng = np.random.default_rng([_HELD_OUT_SEED, RELATIONS.index(relation), i])
        wish = None
        while wish is None:
            drawn = make_relational_scene(rng, size, held_out=True)
            wish = draw_wish(rng, drawn, relation)
        scene = drawn.scene
        edits.append(
            Edit(
                scene.source, scene.mask, first_phrase(*wish.prompt_words), wish.colour, wish.shape,
                finish(scene, wish.colour, wish.shape),
            )
        )  # fmt: skip
    return edits


def _far_place(rng: np.random.Generator, mask: Mask) -> tuple[tuple[float, float], float] | None:
    """Find centre (x, y) and radius of an object at least FAR from `mask`; None if there is no
    place.
    """
    height, width = mask.shape
    side = math.sqrt(height * width)
    for _ in range(_TRIES):
        radius = rng.uniform(*_RADIUS) * side
        centre = (rng.uniform(radius, width - radius), rng.uniform(radius, height - radius))
        ys, xs = np.nonzero(mask)
        gap = np.hypot(xs + 0.5 - centre[0], ys + 0.5 - centre[1]).min() - radius
        if gap >= FAR * side / 128:
            return centre, float(radius)
    return None
