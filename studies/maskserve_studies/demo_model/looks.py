"""The effects of the demo LoRAs on a drawn object, and a judge that sees them.

`ninth-colour` teaches the demo model one more colour: "a brown star". `hollow` draws every object
as its outline, in the prompt's colour and shape.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from PIL import Image, ImageFilter

from maskserve_benchmarks.demo_model.palette import COLOURS, SHAPES, coverage
from maskserve_benchmarks.demo_model.scenes import (
    MIN_CONTRAST,
    Edit,
    Float,
    Mask,
    Picture,
    Scene,
    fill,
    make_scene,
    place,
    to_bytes,
)
from maskserve_studies.demo_model.judge import MAX_COLOUR_DISTANCE, MIN_IOU, judge, match

LOOKS: Final = ("ninth-colour", "hollow")
NINTH: Final = "brown"
NINTH_RGB: Final = (122, 66, 20)
HOLE: Final = 0.55  # share of an outline's radius that is left out of a hollow object
_HELD_OUT_SEED: Final = 7_100_000
_MIN_HOLE: Final = 0.6  # share of the hole's pixels that must show the background
_CORE: Final = 0.75  # share of the hole's radius: its middle, where no antialiased rim reaches


def colours_of(look: str) -> tuple[str, ...]:
    """Return the colours that prompts of this look may name."""
    return (NINTH,) if look == "ninth-colour" else tuple(COLOURS)


def finish_as(look: str, scene: Scene, colour: str, shape: str) -> Picture:
    """Return the right answer to "a `colour` `shape`" with the look's LoRA: (H, W, 3) uint8."""
    centre, radius = place(scene.mask)
    size = scene.mask.shape
    alpha = coverage(shape, centre, radius, size)
    if look == "hollow":
        alpha = alpha - coverage(shape, centre, radius * HOLE, size)
    rgb = np.asarray(NINTH_RGB if colour == NINTH else COLOURS[colour], np.float32)
    painted = scene.background * (1 - alpha[..., None]) + rgb * alpha[..., None]
    return to_bytes(painted.astype(np.float32))


def shows_look(look: str, edited: Picture, edit: Edit) -> bool:
    """Return whether the picture shows the requested object in the LoRA's look."""
    if look == "ninth-colour":
        return _has_ninth_colour(edited, edit)
    centre, radius = place(edit.mask)
    assert edit.shape is not None
    assert edit.colour is not None
    hole = coverage(edit.shape, centre, radius * HOLE * _CORE, edit.mask.shape) > 0.5
    rgb = np.asarray(COLOURS[edit.colour], np.float32)
    painted = np.linalg.norm(edited.astype(np.float32) - rgb, axis=2)
    empty = np.linalg.norm(edited.astype(np.float32) - _behind(edit), axis=2)
    if float((empty < painted)[hole].mean()) < _MIN_HOLE:
        return False
    if judge(edited, edit.source, edit.mask).colour != edit.colour:
        return False
    # The judge fills holes before it compares shapes; one gap in a thin line would leave them open.
    line = edit.mask & (painted < empty) & (painted <= 1.4 * MAX_COLOUR_DISTANCE)
    scores = match(_closed(line))
    best = max(scores, key=lambda shape: scores[shape], default=None)
    return best == edit.shape and scores[edit.shape] >= MIN_IOU


def _closed(line: Mask) -> Mask:
    """Return `line` (H, W) with gaps of up to two pixels bridged."""
    picture = Image.fromarray(line.astype(np.uint8) * 255)
    return np.asarray(picture.filter(ImageFilter.MaxFilter(3)).filter(ImageFilter.MinFilter(3))) > 0


def _has_ninth_colour(edited: Picture, edit: Edit) -> bool:
    """Return whether the object's body is nearer to the ninth colour than to all other colours and
    to the background.
    """
    centre, radius = place(edit.mask)
    assert edit.shape is not None
    body = coverage(edit.shape, centre, radius * 0.8, edit.mask.shape) > 0.9
    palette = np.asarray([NINTH_RGB, *COLOURS.values()], np.float32)
    distance = np.linalg.norm(edited[:, :, None].astype(np.float32) - palette, axis=3)
    behind = np.linalg.norm(edited.astype(np.float32) - _behind(edit), axis=2)
    ninth = (distance.argmin(axis=2) == 0) & (distance[..., 0] < behind)
    outside = (coverage(edit.shape, centre, radius * 1.15, edit.mask.shape) == 0) & edit.mask
    return float(ninth[body].mean()) >= 0.8 and float(ninth[outside].mean()) < 0.2


def _behind(edit: Edit) -> Float:
    """Return the picture around the mask, continued behind the object: (H, W, 3)."""
    return fill(edit.source, edit.mask)


def edits_with(look: str, n: int, size: tuple[int, int] = (128, 128)) -> list[Edit]:
    """Return the first `n` of a fixed list of edits that training never draws, with prompts and
    answers in the look. Colours (of `hollow`) and shapes take turns.
    """
    edits, colours = [], colours_of(look)
    for i in range(n):
        colour, shape = colours[i % len(colours)], SHAPES[(i // len(colours)) % len(SHAPES)]
        rng = np.random.default_rng([_HELD_OUT_SEED, LOOKS.index(look), i])
        while True:
            scene = make_scene(rng, size, held_out=True)
            behind = scene.background[scene.mask]
            rgb = np.asarray(NINTH_RGB if colour == NINTH else COLOURS[colour], np.float32)
            if np.linalg.norm(behind - rgb, axis=1).min() >= MIN_CONTRAST:
                break
        answer = finish_as(look, scene, colour, shape)
        edits.append(Edit(scene.source, scene.mask, f"a {colour} {shape}", colour, shape, answer))
    return edits
