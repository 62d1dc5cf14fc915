"""Edits for the training and judging of the photo model: a picture, a region and the right answer.

As in `demo_model.scenes` the answer is nearly determined. An object stands upright in the middle of
the region's box, as large as its smaller side allows. Behind it the picture goes on.

Numpy and Pillow only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.demo_model.palette import COLOURS, SHAPES, coverage
from maskserve_benchmarks.demo_model.scenes import (
    PHOTOS,
    Float,
    Mask,
    Picture,
    draw_background,
    make_mask,
    mix,
    place,
    to_bytes,
)
from maskserve_studies.photo_model.words import (
    GROUND,
    MATERIALS,
    MORE,
    NOTHING,
    OBJECTS,
    Wish,
)

OBJECT_FILES: Final = CHECKOUT / "assets" / "objects"
HELD_OUT_PHOTOS: Final = (PHOTOS / "rocket.jpg", *sorted((PHOTOS / "held-out").glob("*.jpg")))
_SMALLEST: Final = 0.2  # least side of an object's region, as a share of the picture's side
_TINTS: Final = {"brick": (176, 92, 70), "grass": (92, 146, 52), "gravel": (150, 146, 140)}

Textures = dict[str, Image.Image]
"""A grey picture for each of MATERIALS that has one. The other materials are drawn."""


@dataclass(frozen=True)
class Example:
    """An edit and its right answer. Outside the region the answer is the source."""

    source: Picture
    answer: Picture
    mask: Mask
    wish: Wish
    """The wish of the edit."""
    visible_wish: Wish
    """The wish that the answer shows; for MORE an object."""


@dataclass(frozen=True)
class Stock:
    """The photographs and textures that examples use."""

    photos: Sequence[Image.Image]
    textures: Textures

    def photo(self, rng: np.random.Generator, size: tuple[int, int]) -> Image.Image:
        """A random photograph that a crop of `size` need not enlarge much. Large photographs come
        more often.
        """
        fits = [
            math.sqrt(p.width * p.height) * (min(p.width / size[1], p.height / size[0]) >= 0.8)
            for p in self.photos
        ]
        shares = np.asarray(fits) if any(fits) else np.ones(len(fits))
        return self.photos[int(rng.choice(len(fits), p=shares / shares.sum()))]


KINDS: Final = ("photo", "pattern", "object", "shape", "material", "ground", "more", "whole")
"""`photo` and `pattern` go on behind the region. `object` paints an object, `shape` a shape in a
colour and `material` a shape in a material. `ground` fills the region with a material. `more` adds
one more of several objects. `whole` has no region.
"""
SHARES: Final = (0.34, 0.08, 0.26, 0.1, 0.05, 0.05, 0.06, 0.06)


def draw_example(
    rng: np.random.Generator, stock: Stock, size: tuple[int, int], kind: str | None = None
) -> Example:
    """An example of `size` (height, width) and of one of KINDS; None: a random kind."""
    kind = kind or KINDS[int(rng.choice(len(KINDS), p=SHARES))]
    if kind == "pattern":
        return _unchanged(draw_pattern(rng, stock, size), _region(rng, size))
    picture = photo_crop(rng, stock.photo(rng, size), size)
    if kind == "whole":
        return _unchanged(picture, np.zeros(size, np.bool_))
    if kind == "photo":
        if rng.random() < 0.15:
            picture = _with_bystanders(rng, picture, np.zeros(size, np.bool_))
        return _unchanged(picture, _region(rng, size))
    mask = object_region(rng, size)
    if kind == "more":
        visible_wish = Wish(str(rng.choice(OBJECTS)))
        picture = _with_copies(rng, picture, mask, visible_wish.thing)
        return Example(
            picture, paint(picture, mask, visible_wish, stock, rng), mask, Wish(MORE), visible_wish
        )
    wish = draw_wish(rng, kind)
    if rng.random() < 0.2:
        picture = _with_bystanders(rng, picture, mask)
    return Example(picture, paint(picture, mask, wish, stock, rng), mask, wish, wish)


def _unchanged(picture: Picture, mask: Mask) -> Example:
    """The example in which `picture` goes on in the region."""
    return Example(picture, picture, mask, Wish(NOTHING), Wish(NOTHING))


def draw_wish(rng: np.random.Generator, kind: str) -> Wish:
    """A random wish of one of the KINDS that paint something."""
    if kind == "object":
        return Wish(str(rng.choice(OBJECTS)))
    if kind == "shape":
        return Wish(str(rng.choice(SHAPES)), str(rng.choice(list(COLOURS))))
    if kind == "material":
        return Wish(str(rng.choice(SHAPES)), str(rng.choice(MATERIALS)))
    return Wish(GROUND, str(rng.choice(MATERIALS)))


def paint(
    picture: Picture, mask: Mask, wish: Wish, stock: Stock, rng: np.random.Generator
) -> Picture:
    """`picture` (H, W, 3) with the wish painted in the region."""
    rgb, alpha = look_of(wish, mask, stock, rng)
    share = alpha * mask
    return _over(picture, rgb, share)


def look_of(wish: Wish, mask: Mask, stock: Stock, rng: np.random.Generator) -> tuple[Float, Float]:
    """The look of `wish` in an edit of `mask`: colours (H, W, 3) 0..255 and cover (H, W) 0..1."""
    size = (mask.shape[0], mask.shape[1])
    if wish.thing in (NOTHING, MORE):
        return np.zeros((*size, 3), np.float32), np.zeros(size, np.float32)
    centre, radius = place(mask)
    if wish.thing in OBJECTS:
        return _object(wish.thing, centre, radius, size)
    if wish.thing == GROUND:
        alpha = np.ones(size, np.float32)
    else:
        alpha = coverage(wish.thing, centre, radius, size)
    if wish.look in MATERIALS:
        return material(rng, wish.look, size, stock), alpha
    down = ((np.arange(size[0]) - centre[1]) / radius)[:, None].astype(np.float32)
    across = ((np.arange(size[1]) - centre[0]) / radius)[None].astype(np.float32)
    light = np.clip(-0.24 * down - 0.12 * across, -0.3, 0.3)[..., None]  # from the upper left
    rgb = np.asarray(COLOURS[wish.look], np.float32)
    shaded = np.where(light > 0, rgb + (255 - rgb) * light, rgb * (1 + light))
    return shaded.astype(np.float32), alpha


def material(rng: np.random.Generator, name: str, size: tuple[int, int], stock: Stock) -> Float:
    """A surface (H, W, 3) 0..255 of one of MATERIALS."""
    if name not in stock.textures:
        return _wood(rng, size)
    grey = stock.textures[name]
    side = min(grey.size)
    scale = side / max(size) * rng.uniform(0.5, 1)
    w, h = size[1] * scale, size[0] * scale
    x, y = rng.uniform(0, grey.width - w), rng.uniform(0, grey.height - h)
    part = grey.resize((size[1], size[0]), Image.Resampling.BICUBIC, (x, y, x + w, y + h))
    shade = np.asarray(part, np.float32)[..., None] / 128
    return np.asarray(np.clip(np.asarray(_TINTS[name], np.float32) * shade, 0, 255), np.float32)


def photo_crop(
    rng: np.random.Generator, photo: Image.Image, size: tuple[int, int], *, jitter: bool = True
) -> Picture:
    """A part of a photograph, at most three times reduced, flipped and with changed light."""
    height, width = size
    widest = min(photo.width / width, photo.height / height)
    scale = math.exp(rng.uniform(math.log(min(0.8, widest)), math.log(min(widest, 3.0))))
    w, h = width * scale, height * scale
    x, y = rng.uniform(0, photo.width - w), rng.uniform(0, photo.height - h)
    crop = photo.resize(
        (width, height), Image.Resampling.BICUBIC, (x, y, x + w, y + h), reducing_gap=2.0
    )
    if rng.random() < 0.5:
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if not jitter:
        return np.asarray(crop)
    gamma = math.exp(rng.uniform(-0.25, 0.25))
    ramp = np.linspace(0, 1, 256) ** gamma * 255
    table = np.concatenate([np.clip(ramp * rng.uniform(0.88, 1.08), 0, 255) for _ in range(3)])
    crop = crop.point([int(x) for x in table])
    picture = np.asarray(crop)
    if rng.random() < 0.4:
        grey = picture.mean(axis=2, keepdims=True)
        picture = to_bytes(grey + (picture - grey) * rng.uniform(0.3, 1.4))
    return picture


def draw_pattern(rng: np.random.Generator, stock: Stock, size: tuple[int, int]) -> Picture:
    """A regular picture that has a clear continuation: a gradient, stripes, tiles, dots or a
    material.
    """
    kind = str(rng.choice(["gradient", "stripes", "noise", "tiles", "dots", "material"]))
    if kind == "material":
        return to_bytes(material(rng, str(rng.choice(MATERIALS)), size, stock))
    if kind not in ("tiles", "dots"):
        return to_bytes(draw_background(rng, kind, size)[0])
    a, b = rng.uniform(30, 235, 3).astype(np.float32), rng.uniform(30, 235, 3).astype(np.float32)
    angle, pitch = rng.uniform(0, math.pi), rng.uniform(20, 60)
    ys, xs = np.mgrid[0 : size[0], 0 : size[1]].astype(np.float32)
    u = (xs * math.cos(angle) + ys * math.sin(angle)) / pitch + rng.uniform()
    v = (ys * math.cos(angle) - xs * math.sin(angle)) / pitch + rng.uniform()
    if kind == "tiles":
        wave = np.sin(math.pi * u) * np.sin(math.pi * v) * pitch / 3
    else:
        wave = (0.33 - np.hypot(u % 1 - 0.5, v % 1 - 0.5)) * pitch
    return to_bytes(mix(a, b, np.clip(wave + 0.5, 0, 1)))


def object_region(rng: np.random.Generator, size: tuple[int, int]) -> Mask:
    """A region large enough for an object."""
    while True:
        mask = make_mask(rng, size)
        rows, columns = mask.any(axis=1).sum(), mask.any(axis=0).sum()
        if min(rows, columns) >= _SMALLEST * min(size):
            return mask


def _region(rng: np.random.Generator, size: tuple[int, int]) -> Mask:
    """A random region: a rectangle, an ellipse, a blob or a brush stroke."""
    if rng.random() < 0.7:
        return make_mask(rng, size)
    image = Image.new("1", (size[1], size[0]))
    side = math.sqrt(size[0] * size[1])
    points = [(float(rng.uniform(0, size[1])), float(rng.uniform(0, size[0])))]
    for _ in range(int(rng.integers(1, 4))):
        turn, length = rng.uniform(0, 2 * math.pi), rng.uniform(0.1, 0.5) * side
        points.append(
            (points[-1][0] + math.cos(turn) * length, points[-1][1] + math.sin(turn) * length)
        )
    brush = rng.uniform(0.03, 0.16) * side
    draw = ImageDraw.Draw(image)
    draw.line(points, fill=1, width=max(2, round(brush)))
    for x, y in points:
        draw.ellipse((x - brush / 2, y - brush / 2, x + brush / 2, y + brush / 2), fill=1)
    return np.asarray(image, np.bool_)


def _object(
    name: str, centre: tuple[float, float], radius: float, size: tuple[int, ...]
) -> tuple[Float, Float]:
    side = max(2, round(2 * radius))
    left, top = round(centre[0] - side / 2), round(centre[1] - side / 2)
    canvas = Image.new("RGBA", (size[1], size[0]))
    canvas.paste(sprite(name).resize((side, side), Image.Resampling.BICUBIC), (left, top))
    pixels = np.asarray(canvas, np.float32)
    return pixels[..., :3], pixels[..., 3] / 255


@cache
def sprite(name: str) -> Image.Image:
    """The picture of one of OBJECTS, RGBA, 256 x 256."""
    with Image.open(OBJECT_FILES / f"{name}.webp") as image:
        return image.convert("RGBA")


def _with_bystanders(rng: np.random.Generator, picture: Picture, mask: Mask) -> Picture:
    """`picture` with one or two objects that keep clear of the region."""
    for _ in range(int(rng.integers(1, 3))):
        radius = rng.uniform(0.08, 0.16) * min(mask.shape)
        picture = _pasted(rng, picture, mask, str(rng.choice(OBJECTS)), radius)
    return picture


def _with_copies(rng: np.random.Generator, picture: Picture, mask: Mask, name: str) -> Picture:
    """`picture` with one to three of the same object, about as large as the region's."""
    radius = place(mask)[1]
    for _ in range(int(rng.integers(1, 4))):
        picture = _pasted(rng, picture, mask, name, radius * rng.uniform(0.6, 1))
    return picture


def _pasted(
    rng: np.random.Generator, picture: Picture, mask: Mask, name: str, radius: float
) -> Picture:
    """`picture` with an object of `radius` pixels at some place clear of the region, if any."""
    height, width = mask.shape
    for _ in range(12):
        x, y = rng.uniform(radius, width - radius), rng.uniform(radius, height - radius)
        top, left = max(0, int(y - radius)), max(0, int(x - radius))
        if not mask[top : int(y + radius) + 1, left : int(x + radius) + 1].any():
            rgb, alpha = _object(name, (float(x), float(y)), float(radius), mask.shape)
            return _over(picture, rgb, alpha)
    return picture


def _over(picture: Picture, rgb: Float, alpha: Float) -> Picture:
    behind = picture.astype(np.float32)
    return to_bytes(behind + (rgb - behind) * alpha[..., None])


def _wood(rng: np.random.Generator, size: tuple[int, int]) -> Float:
    """Boards with a grain."""
    height, width = size
    ys, xs = np.mgrid[0:height, 0:width].astype(np.float32)
    board = max(24.0, 0.16 * max(size))
    row = np.floor(ys / board + rng.uniform())
    phase = (np.sin(row * 12.9898 + rng.uniform(0, 6)) * 43.7) % 6.3
    bend = np.sin(xs / (0.5 * board) + phase) * 0.12 + np.sin(xs / (1.7 * board) + 2 * phase) * 0.2
    grain = np.sin((ys / board + bend) * 34 + phase) * 0.5
    fine: NDArray[np.float64] = rng.normal(size=(height, max(1, width // 24)))
    streaks = np.asarray(
        Image.fromarray((fine * 24 + 128).clip(0, 255).astype(np.uint8)).resize(
            (width, height), Image.Resampling.BICUBIC
        ),
        np.float32,
    )
    shade = 1 + 0.1 * grain + (streaks - 128) / 900 + 0.07 * np.sin(phase * 5)
    gap = np.abs(ys / board + 0 * xs - np.round(ys / board)) < 0.6 / board
    rgb = np.asarray((178, 124, 74), np.float32) * np.where(gap, 0.55 * shade, shade)[..., None]
    return np.asarray(np.clip(rgb, 0, 255), np.float32)
