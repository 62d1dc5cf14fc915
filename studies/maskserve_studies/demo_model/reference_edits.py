"""Edits that name the object to change: "make the blue square a red star".

The picture has several objects, and only the prompt says which one to change: a model that takes
the source as reference does not get the mask. Numpy and Pillow only, like `scenes.py`.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from maskserve_benchmarks.demo_model.palette import COLOURS, SHAPES, coverage
from maskserve_benchmarks.demo_model.scenes import (
    Edit,
    Float,
    Mask,
    Picture,
    contrasting_colours_at,
    draw_background,
    to_bytes,
)

RADII: Final = (13.0, 19.0)  # pixels of the circle around an object, whatever the picture's size
GAP: Final = 3.0  # pixels between two objects' circles
MARGIN: Final = 2.0  # pixels between a mask and its object's circle
MAX_LENGTH: Final = 32  # tokens of the prompt with its chat template
SIDES: Final = ("left", "right", "top", "bottom")
BOTH_PROMPTS: Final = (
    "make the {name} a {c} {s}",
    "turn the {name} into a {c} {s}",
    "change the {name} to a {c} {s}",
    "replace the {name} with a {c} {s}",
)
COLOUR_PROMPTS: Final = ("make the {name} {c}", "colour the {name} {c}", "turn the {name} {c}")
SHAPE_PROMPTS: Final = ("make the {name} a {s}", "turn the {name} into a {s}")
REMOVAL_PROMPTS: Final = ("remove the {name}", "erase the {name}")
PACKAGE_PICTURES: Final = (
    "brick.png", "coins.png", "color.png", "grass.png", "gravel.png", "ihc.png",
    "microaneurysms.png", "moon.png", "motorcycle_left.png", "page.png", "retina.jpg",
)  # fmt: skip
"""Photographs of scikit-image that are not in assets/photos."""
_HELD_OUT_SEED: Final = 9_000_000


@dataclass(frozen=True)
class PlacedObject:
    """An object in the picture."""

    colour: str
    shape: str
    centre: tuple[float, float]
    """x, y in pixels."""
    radius: float


@dataclass(frozen=True)
class ObjectScene:
    """A picture with objects in it."""

    background: Float
    things: tuple[PlacedObject, ...]

    def drawn(self, things: tuple[PlacedObject, ...]) -> Picture:
        """Return the background with these objects instead of the scene's own."""
        picture = self.background
        for thing in things:
            alpha = coverage(thing.shape, thing.centre, thing.radius, picture.shape[:2])[..., None]
            picture = picture + (np.asarray(COLOURS[thing.colour], np.float32) - picture) * alpha
        return to_bytes(picture)


@dataclass(frozen=True)
class NamedWish:
    """The change that a prompt asks for."""

    prompt: str
    number: int
    """Index of the object in the scene."""
    becomes: PlacedObject | None
    """The object that replaces it; None: the object is removed."""
    name_parts: tuple[str | None, str | None, str | None]
    """Colour, shape and side by which the prompt names the object."""
    changes: tuple[str | None, str | None]
    """Colour and shape that the prompt asks for."""


def make_object_scene(
    rng: np.random.Generator,
    size: tuple[int, int],
    most: int = 4,
    *,
    held_out: bool = False,
    photographs: Sequence[Path] = (),
) -> ObjectScene:
    """Draw one to `most` objects on a background of `size` (height, width).

    Args:
        rng: random generator for all draws.
        size: height and width of the picture.
        most: largest number of objects.
        held_out: also draw from the photograph that training never sees.
        photographs: files that backgrounds are cut out of; if empty, backgrounds are drawn as in
            training.
    """
    kind = str(rng.choice(["gradient", "noise", "stripes", "photo"], p=[0.4, 0.2, 0.2, 0.2]))
    while True:
        if photographs:
            background = crop_of(rng, photographs[int(rng.integers(len(photographs)))], size)
        else:
            background, _ = draw_background(rng, kind, size, held_out=held_out)
        thing_count, things = int(rng.integers(1, most + 1)), list[PlacedObject]()
        for _ in range(8 * thing_count):
            if len(things) == thing_count:
                break
            radius = float(rng.uniform(*RADII))
            edge = radius + MARGIN
            x, y = (float(rng.uniform(edge, side - edge)) for side in (size[1], size[0]))
            if any(math.dist((x, y), t.centre) < radius + t.radius + GAP for t in things):
                continue
            colours = contrasting_colours_at(background, (x, y), radius)
            if len(colours) < 2:
                continue
            alike = [t.colour for t in things if t.colour in colours]
            free = [c for c in colours if c not in alike]
            pick = alike if alike and (not free or rng.random() < 0.2) else free
            used_shapes = {t.shape for t in things if t.colour in alike}
            colour = str(rng.choice(pick))
            shape = str(rng.choice([s for s in SHAPES if s not in used_shapes]))
            things.append(PlacedObject(colour, shape, (x, y), radius))
        if things:
            return ObjectScene(background, tuple(things))


def draw_named_wish(
    rng: np.random.Generator, scene: ObjectScene, kind: str, *, side: bool = False
) -> NamedWish:
    """Draw a wish of `kind`: both, colour, shape or gone. With `side` the prompt names the object
    by its place.
    """
    things = scene.things
    number = int(rng.integers(len(things)))
    side_name = None
    if side and len(things) > 1:
        side_name = str(rng.choice(SIDES))
        axis, first = side_name in ("top", "bottom"), side_name in ("left", "top")
        order = sorted(range(len(things)), key=lambda i: things[i].centre[axis])
        number = order[0 if first else -1]
    thing = things[number]
    colours = contrasting_colours_at(scene.background, thing.centre, thing.radius)
    colour = str(rng.choice([c for c in colours if c != thing.colour]))
    shape = str(rng.choice([s for s in SHAPES if s != thing.shape]))
    colour = colour if kind in ("both", "colour") else thing.colour
    shape = shape if kind in ("both", "shape") else thing.shape
    words = {
        "both": BOTH_PROMPTS,
        "colour": COLOUR_PROMPTS,
        "shape": SHAPE_PROMPTS,
        "gone": REMOVAL_PROMPTS,
    }[kind]
    name = f"{side_name} one" if side_name else f"{thing.colour} {thing.shape}"
    name_parts = (None, None, side_name) if side_name else (thing.colour, thing.shape, None)
    changes = (
        colour if kind in ("both", "colour") else None,
        shape if "{s}" in words[0] else None,
    )
    prompt = str(rng.choice(words)).format(name=name, c=colour, s=shape)
    becomes = None if kind == "gone" else replace(thing, colour=colour, shape=shape)
    return NamedWish(prompt, number, becomes, name_parts, changes)


def answer_of(scene: ObjectScene, wish: NamedWish) -> Picture:
    """Return the right answer to a wish."""
    things = list(scene.things)
    things[wish.number : wish.number + 1] = [] if wish.becomes is None else [wish.becomes]
    return scene.drawn(tuple(things))


def mask_of(thing: PlacedObject, size: tuple[int, int]) -> Mask:
    """Return a square around an object, True = edit."""
    mask = np.zeros(size, np.bool_)
    (x, y), reach = thing.centre, thing.radius + MARGIN
    low = [max(0, math.floor(c - reach)) for c in (y, x)]
    high = [min(s, math.ceil(c + reach)) for c, s in zip((y, x), size, strict=True)]
    mask[low[0] : high[0], low[1] : high[1]] = True
    return mask


def package_photographs() -> list[Path]:
    """Return the pictures in the scikit-image and matplotlib packages that no generator of this
    project has seen.
    """
    folders = {
        "skimage": ("data", PACKAGE_PICTURES),
        "matplotlib": ("mpl-data/sample_data", ("grace_hopper.jpg",)),
    }
    pictures = []
    for package, (folder, names) in folders.items():
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        pictures += [Path(spec.origin).parent / folder / name for name in names]
    return pictures


def crop_of(rng: np.random.Generator, file: Path, size: tuple[int, int]) -> Float:
    """Cut a square of at least half the shorter side out of a photograph: [height, width, 3],
    0..255.
    """
    with Image.open(file) as opened:
        photo = opened.convert("RGB")
    side = int(rng.uniform(0.5, 1.0) * min(photo.size))
    left, top = (int(rng.integers(0, length - side + 1)) for length in photo.size)
    cut = photo.crop((left, top, left + side, top + side))
    return np.asarray(cut.resize(size[::-1], Image.Resampling.LANCZOS), np.float32)


def named_edits(
    n: int = 200,
    size: tuple[int, int] = (128, 128),
    kind: str = "both",
    *,
    side: bool = False,
    photographs: Sequence[Path] = (),
    bare: bool = False,
) -> list[Edit]:
    """Return the first `n` of a fixed list of edits that training never draws.

    Args:
        n: number of edits.
        size: height and width of their pictures.
        kind: `both`, `colour`, `shape` or `gone`: the part of the object that the prompt changes.
        side: whether the prompt names the object by its place.
        photographs: files that backgrounds are cut out of; if empty, backgrounds are drawn as in
            training.
        bare: whether the picture lacks the object that the prompt names.
    """
    edits = []
    for i in range(n):
        rng = np.random.default_rng([_HELD_OUT_SEED, i])
        scene = make_object_scene(rng, size, held_out=True, photographs=photographs)
        wish = draw_named_wish(rng, scene, kind, side=side)
        mask = mask_of(scene.things[wish.number], size)
        source, thing = scene.drawn(() if bare else scene.things), wish.becomes
        target = np.where(mask[..., None], answer_of(scene, wish), source)
        colour, shape = (thing.colour, thing.shape) if thing else (None, None)
        edits.append(Edit(source, mask, wish.prompt, colour, shape, target))
    return edits


NAMED_CLASSES: Final = ("both", "colour", "shape", "gone", "side")
"""The part of the object that a prompt changes; `side` names the object by its place."""


def named_class(
    name: str,
    n: int,
    size: tuple[int, int] = (128, 128),
    photographs: Sequence[Path] = (),
    *,
    bare: bool = False,
) -> list[Edit]:
    """Return the first `n` edits of one of NAMED_CLASSES; the rest goes to `named_edits`."""
    side = name == "side"
    kind = "both" if side else name
    return named_edits(n, size, kind, side=side, photographs=photographs, bare=bare)


def prompt_words() -> list[str]:
    """Return every word that occurs in named prompts, sorted."""
    text = " ".join((*BOTH_PROMPTS, *COLOUR_PROMPTS, *SHAPE_PROMPTS, *REMOVAL_PROMPTS))
    for field in ("{name}", "{c}", "{s}"):
        text = text.replace(field, " ")
    return sorted({*text.split(), *COLOURS, *SHAPES, *SIDES, "one"})
