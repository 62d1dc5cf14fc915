"""Procedural edits: a source picture, a mask, and what the answer should look like.

The answer is nearly determined by what the model sees: the object is centred in the mask's
bounding box, sized by its smaller side and never rotated, and the background behind it
continues what surrounds the mask. That makes a tiny model learnable and a judge possible.

Numpy and Pillow only: the server's benchmarks and tests draw the same edits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.demo_model.palette import COLOURS, SHAPES, coverage

Picture = NDArray[np.uint8]  # (H, W, 3), 0..255
Mask = NDArray[np.bool_]  # (H, W), True = edit
Float = NDArray[np.float32]

PHOTOS: Final = CHECKOUT / "assets" / "photos"
HELD_OUT_PHOTO: Final = "rocket.jpg"  # never drawn in training
MIN_MASK_SIDE: Final = 28  # pixels at 128 x 128; below it a drawn shape is too coarse to tell
OBJECT_RADIUS: Final = 0.46  # share of the mask's smaller side: the shape fits an inscribed ellipse
MIN_CONTRAST: Final = 90.0  # RGB distance between an object and the colours behind it
_HELD_OUT_SEED: Final = 7_000_000


@dataclass(frozen=True)
class Scene:
    """A source picture with a region to edit, without a prompt."""

    source: Picture
    mask: Mask
    background: Float
    """(H, W, 3) 0..255: the source with the region emptied, as an ideal edit leaves it."""


@dataclass(frozen=True)
class Edit:
    """One edit and its right answer."""

    source: Picture
    mask: Mask
    prompt: str
    colour: str | None
    """Colour of the object in the answer; None if the prompt is empty and nothing is added."""
    shape: str | None
    target: Picture


def make_scene(rng: np.random.Generator, size: tuple[int, int], *, held_out: bool = False) -> Scene:
    """Draw a scene of `size` (height, width); `held_out` adds the photo training never sees."""
    mask = make_mask(rng, size)
    kind = rng.choice(["gradient", "noise", "stripes", "photo"], p=[0.3, 0.2, 0.2, 0.3])
    background, continues = draw_background(rng, str(kind), size, held_out=held_out)
    _draw_bystanders(rng, background, mask)
    source = background.copy()
    background = emptied(background, mask, continues=continues)
    if rng.random() < 0.5:  # an object to replace
        colour, shape = str(rng.choice(list(COLOURS))), str(rng.choice(SHAPES))
        source = draw_object(source, mask, colour, shape)
    return Scene(to_bytes(source), mask, background)


def emptied(picture: Float, mask: Mask, *, continues: bool) -> Float:
    """Return `picture` as an ideal edit leaves it: unchanged if it is predictable, else filled."""
    return picture if continues else np.where(mask[..., None], fill(picture, mask), picture)


def finish(scene: Scene, colour: str, shape: str) -> Picture:
    """Return the right answer to "a `colour` `shape`" in this scene."""
    return to_bytes(draw_object(scene.background, scene.mask, colour, shape))


def place(mask: Mask) -> tuple[tuple[float, float], float]:
    """Return centre (x, y) and radius in pixels of the object that an edit of `mask` must show."""
    ys, xs = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    top, bottom, left, right = ys[0], ys[-1] + 1, xs[0], xs[-1] + 1
    radius = OBJECT_RADIUS * min(bottom - top, right - left)
    return ((left + right) / 2, (top + bottom) / 2), float(radius)


def draw_object(picture: Float, mask: Mask, colour: str, shape: str) -> Float:
    """Return `picture` (H, W, 3) 0..255 with the object at the place that `place` gives."""
    centre, radius = place(mask)
    alpha = coverage(shape, centre, radius, mask.shape)[..., None]
    return (picture * (1 - alpha) + np.asarray(COLOURS[colour], np.float32) * alpha).astype(
        np.float32
    )


def contrasting_colours(scene: Scene) -> list[str]:
    """Return the palette colours that stand out from the colours behind the object."""
    return contrasting_colours_at(scene.background, *place(scene.mask))


def contrasting_colours_at(picture: Float, centre: tuple[float, float], radius: float) -> list[str]:
    """Return the palette colours that stand out in `picture` within `radius` pixels of `centre` (x,
    y).
    """
    behind = picture[coverage("circle", centre, radius, picture.shape[:2]) > 0.5]
    return [
        name
        for name, rgb in COLOURS.items()
        if np.linalg.norm(behind - np.asarray(rgb, np.float32), axis=1).min() >= MIN_CONTRAST
    ]


def held_out_edits(n: int = 200, size: tuple[int, int] = (128, 128)) -> list[Edit]:
    """Return the first `n` of a fixed list of edits that training never draws.

    Colours and shapes take turns, so any multiple of 48 is balanced. `size` is height, width.
    """
    edits = []
    colours = list(COLOURS)
    for i in range(n):
        colour = colours[i % len(colours)]
        shape = SHAPES[(i // len(colours)) % len(SHAPES)]
        rng = np.random.default_rng([_HELD_OUT_SEED, i])
        while True:
            scene = make_scene(rng, size, held_out=True)
            if colour in contrasting_colours(scene):
                break
        prompt = f"a {colour} {shape}"
        edits.append(
            Edit(scene.source, scene.mask, prompt, colour, shape, finish(scene, colour, shape))
        )
    return edits


def make_mask(rng: np.random.Generator, size: tuple[int, int]) -> Mask:
    """Draw a rectangle, ellipse or blob that covers 4..40 % of `size` (height, width), anywhere in
    it.
    """
    height, width = size
    smallest = MIN_MASK_SIDE * math.sqrt(height * width) / 128
    area = height * width * math.exp(rng.uniform(math.log(0.048), math.log(0.4)))
    aspect = math.exp(rng.uniform(-0.5, 0.5))
    w = min(max(math.sqrt(area * aspect), smallest), 0.95 * width)
    h = min(max(math.sqrt(area / aspect), smallest), 0.95 * height)
    x0, y0 = round(rng.uniform(0, width - w)), round(rng.uniform(0, height - h))
    box = (x0, y0, x0 + round(w) - 1, y0 + round(h) - 1)  # inclusive corners
    image = Image.new("1", (width, height))
    draw = ImageDraw.Draw(image)
    kind = rng.choice(["rectangle", "ellipse", "blob"])
    if kind == "rectangle":
        draw.rectangle(box, fill=1)
    else:
        draw.ellipse(box, fill=1)
    if kind == "blob":  # bulges beyond the ellipse, clipped to its box: the box stays the same
        for _ in range(rng.integers(2, 5)):
            bx, by = rng.uniform(box[0], box[2]), rng.uniform(box[1], box[3])
            bw, bh = w * rng.uniform(0.15, 0.3), h * rng.uniform(0.15, 0.3)
            draw.ellipse(
                (max(bx - bw, box[0]), max(by - bh, box[1]),
                 min(bx + bw, box[2]), min(by + bh, box[3])), fill=1,
            )  # fmt: skip
    return np.asarray(image, np.bool_)


def fill(picture: NDArray[np.generic], mask: Mask) -> Float:
    """Return `picture` (H, W, 3) with the masked pixels continued smoothly from the others.

    Push-pull: average the known pixels into ever coarser levels, then fill each level's holes
    from the coarser one.
    """
    value = picture.astype(np.float32)
    weight = (~mask).astype(np.float32)[..., None]
    return _push_pull(value * weight, weight)


def _push_pull(value: Float, weight: Float) -> Float:
    """Return the filled picture; `value` is premultiplied by `weight` (0..1)."""
    height, width = weight.shape[:2]
    filled = value / np.maximum(weight, 1e-6)
    if min(height, width) <= 1 or float(weight.min()) >= 1:
        return filled
    pad = ((0, height % 2), (0, width % 2), (0, 0))
    stacked = np.pad(np.concatenate([value, weight], axis=2), pad)
    quad = stacked.reshape(stacked.shape[0] // 2, 2, stacked.shape[1] // 2, 2, 4).sum(axis=(1, 3))
    scale = np.minimum(1.0, 1.0 / np.maximum(quad[..., 3:], 1e-6))
    quad = (quad * scale).astype(np.float32)
    coarse = _push_pull(quad[..., :3], quad[..., 3:])
    up = _smooth(np.repeat(np.repeat(coarse, 2, axis=0), 2, axis=1))[:height, :width]
    return weight * filled + (1 - weight) * up


def _smooth(picture: Float) -> Float:
    """Apply a [1 2 1] blur in both directions, with edges repeated."""
    padded = np.pad(picture, ((1, 1), (0, 0), (0, 0)), mode="edge")
    picture = (padded[:-2] + 2 * padded[1:-1] + padded[2:]) / 4
    padded = np.pad(picture, ((0, 0), (1, 1), (0, 0)), mode="edge")
    return (padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]) / 4


def draw_background(
    rng: np.random.Generator, kind: str, size: tuple[int, int], *, held_out: bool = False
) -> tuple[Float, bool]:
    """Draw a picture (H, W, 3) 0..255, and say whether it continues predictably behind a mask.

    `kind` is gradient, noise, stripes or photo; `held_out` adds the photo training never sees.
    """
    height, width = size
    if kind == "photo":
        return _photo_crop(rng, size, held_out), False
    a, b = quiet_colour(rng), quiet_colour(rng)
    if kind == "noise":
        cells = int(rng.integers(3, 9))
        grid = rng.uniform(0, 255, (cells, cells)).astype(np.uint8)
        large = Image.fromarray(grid).resize((width, height), Image.Resampling.BICUBIC)
        return mix(a, b, np.asarray(large, np.float32) / 255), False
    angle = rng.uniform(0, math.pi)
    ys, xs = np.mgrid[0:height, 0:width].astype(np.float32) / math.sqrt(height * width)
    along = xs * math.cos(angle) + ys * math.sin(angle)
    if kind == "gradient":
        if rng.random() < 0.3:
            along = np.hypot(xs - rng.uniform(0, 1), ys - rng.uniform(0, 1))
        ramp = (along - along.min()) / max(float(np.ptp(along)), 1e-6)
        return mix(a, b, ramp.astype(np.float32)), True
    b = a + np.clip(b - a, -45, 45)  # stripes: quiet contrast
    wave = np.sin(along * 2 * math.pi * rng.uniform(3, 9) + rng.uniform(0, 6.3))
    return mix(a, b, np.clip(wave * 3, -1, 1) / 2 + 0.5), True


def _draw_bystanders(rng: np.random.Generator, picture: Float, mask: Mask) -> None:
    """Draw 0..3 objects outside the mask into `picture`."""
    height, width = mask.shape
    for _ in range(rng.integers(0, 4)):
        radius = rng.uniform(0.06, 0.14) * math.sqrt(height * width)
        centre = (rng.uniform(radius, width - radius), rng.uniform(radius, height - radius))
        shape, colour = str(rng.choice(SHAPES)), str(rng.choice(list(COLOURS)))
        alpha = coverage(shape, centre, radius, mask.shape)[..., None]
        near = coverage("circle", centre, radius * 1.4, mask.shape) > 0
        if not (near & mask).any():  # else the object would reach into the region to edit
            picture += (np.asarray(COLOURS[colour], np.float32) - picture) * alpha


def _photo_crop(rng: np.random.Generator, size: tuple[int, int], held_out: bool) -> Float:
    names = sorted(p.name for p in PHOTOS.glob("*.jpg") if held_out or p.name != HELD_OUT_PHOTO)
    photo = _photo(str(rng.choice(names)))
    height, width = size
    widest = min(photo.width / width, photo.height / height)
    scale = rng.uniform(min(1.0, widest), widest)
    w, h = width * scale, height * scale
    x, y = rng.uniform(0, photo.width - w), rng.uniform(0, photo.height - h)
    crop = photo.resize((width, height), Image.Resampling.BILINEAR, (x, y, x + w, y + h))
    if rng.random() < 0.5:
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(crop, np.float32)


@cache
def _photo(name: str) -> Image.Image:
    with Image.open(PHOTOS / name) as image:
        return image.convert("RGB")


def quiet_colour(rng: np.random.Generator) -> Float:
    """Draw an RGB triple 0..255 of low saturation, so that palette colours stand out."""
    grey = rng.uniform(30, 235)
    return np.clip(grey + rng.uniform(-38, 38, 3), 0, 255).astype(np.float32)


def mix(a: Float, b: Float, share: NDArray[Any]) -> Float:
    """Blend: `a` where `share` (H, W) is 0, `b` where it is 1."""
    return (a + (b - a) * share[..., None]).astype(np.float32)


def to_bytes(picture: Float) -> Picture:
    """Round and clip to 0..255."""
    return np.clip(np.rint(picture), 0, 255).astype(np.uint8)
