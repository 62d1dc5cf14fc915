"""A deterministic judge of one edit: it finds the colour and the shape inside the mask.

1. The background behind the region is estimated from the source's pixels outside the mask.
2. A pixel inside the mask belongs to a palette colour when that colour is its nearest, within
   MAX_COLOUR_DISTANCE, and nearer than the estimated background. The colour with the most
   pixels wins the vote, if it covers MIN_COVER of the mask's inscribed ellipse.
3. The winner's pixels (largest connected piece, holes filled) are cut out, scaled to a square
   of GRID pixels keeping their aspect, and compared with a drawn template of every shape. The
   shape with the highest intersection over union wins, if that is at least MIN_IOU.

Position and size do not count, so pictures of any size and from any producer can be judged.
Numpy and Pillow only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from maskserve_benchmarks.demo_model.palette import COLOURS, SHAPES, coverage
from maskserve_benchmarks.demo_model.scenes import Mask, Picture, fill

MAX_COLOUR_DISTANCE: Final = 100.0  # RGB, 0..255 per channel
MIN_COVER: Final = 0.08  # share of the mask's pixels; the thinnest star in a rectangle covers 0.18
MIN_IOU: Final = 0.6
GRID: Final = 48
_JUDGED_SIDE: Final = 256  # larger pictures are reduced to it first

Silhouette = NDArray[np.bool_]


@dataclass(frozen=True)
class Verdict:
    """The judge's view of one picture; `None` means that nothing is clear enough."""

    colour: str | None
    shape: str | None
    cover: float
    """Share of the mask's pixels that the winning colour covers."""
    scores: dict[str, float]
    """Intersection over union with every shape's template."""

    def matches(self, colour: str | None, shape: str | None) -> bool:
        """Return whether colour and shape are the requested ones."""
        return self.colour == colour and self.shape == shape


def judge(edited: Picture, source: Picture, mask: Mask) -> Verdict:
    """Judge `edited` against `source`, both (H, W, 3) uint8, inside `mask` (H, W), True = edit."""
    edited, source, mask = _reduce(edited, source, mask)
    behind = fill(source, mask)
    palette = np.asarray(list(COLOURS.values()), np.float32)
    distance = np.linalg.norm(edited[:, :, None].astype(np.float32) - palette, axis=3)
    nearest = distance.argmin(axis=2)
    to_colour = distance.min(axis=2)
    to_behind = np.linalg.norm(edited - behind, axis=2)
    member = mask & (to_colour <= MAX_COLOUR_DISTANCE) & (to_colour < to_behind)
    votes = np.bincount(nearest[member], minlength=len(palette))
    winner = int(votes.argmax())
    cover = float(votes[winner] / max(int(mask.sum()), 1))
    if cover < MIN_COVER:
        return Verdict(None, None, cover, {})
    # The edge of the object lies halfway between its colour and the colour behind it.
    silhouette = mask & (distance[..., winner] < to_behind)
    silhouette &= distance[..., winner] <= 1.4 * MAX_COLOUR_DISTANCE
    scores = match(silhouette)
    best = max(scores, key=lambda shape: scores[shape], default=None)
    if best is not None and scores[best] < MIN_IOU:
        best = None
    return Verdict(list(COLOURS)[winner], best, cover, scores)


def match(silhouette: Silhouette) -> dict[str, float]:
    """Return the intersection over union of the normalised `silhouette` with every template."""
    piece = _without_holes(_largest_piece(silhouette))
    if piece.sum() < 9:
        return {}
    grid = normalise(piece)
    return {
        shape: float((grid & template).sum() / (grid | template).sum())
        for shape, template in _templates().items()
    }


def normalise(piece: Silhouette) -> Silhouette:
    """Return the bounding box of `piece`, scaled to touch GRID x GRID and centred in it."""
    ys, xs = np.flatnonzero(piece.any(axis=1)), np.flatnonzero(piece.any(axis=0))
    box = piece[ys[0] : ys[-1] + 1, xs[0] : xs[-1] + 1]
    scale = GRID / max(box.shape)
    height, width = (max(1, round(side * scale)) for side in box.shape)
    image = Image.fromarray(box.astype(np.uint8) * 255)
    small = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR)) >= 128
    grid = np.zeros((GRID, GRID), np.bool_)
    top, left = (GRID - height) // 2, (GRID - width) // 2
    grid[top : top + height, left : left + width] = small
    return grid


@cache
def _templates() -> dict[str, Silhouette]:
    side = 200
    return {
        shape: normalise(coverage(shape, (side / 2, side / 2), side * 0.45, (side, side)) > 0.5)
        for shape in SHAPES
    }


def _reduce(edited: Picture, source: Picture, mask: Mask) -> tuple[Picture, Picture, Mask]:
    """Shrink all three to at most _JUDGED_SIDE pixels a side."""
    height, width = mask.shape
    if edited.shape != source.shape or edited.shape[:2] != mask.shape:
        raise ValueError(
            f"judge: edited {edited.shape}, source {source.shape} and mask {mask.shape} differ"
        )
    longest = max(height, width)
    if longest <= _JUDGED_SIDE:
        return edited, source, mask
    size = (
        math.ceil(width * _JUDGED_SIDE / longest),
        math.ceil(height * _JUDGED_SIDE / longest),
    )
    small = [
        np.asarray(Image.fromarray(x).resize(size, Image.Resampling.BOX)) for x in (edited, source)
    ]
    part = Image.fromarray(mask.astype(np.uint8) * 255).resize(size, Image.Resampling.BOX)
    return small[0], small[1], np.asarray(part) >= 128


def _largest_piece(silhouette: Silhouette) -> Silhouette:
    """Return the largest 4-connected piece of `silhouette`."""
    if not silhouette.any():
        return silhouette
    labels = _label(silhouette)
    return labels == np.bincount(labels[silhouette]).argmax()


def _without_holes(piece: Silhouette) -> Silhouette:
    """Return `piece` with its holes filled: all pixels that the picture's rim cannot reach."""
    outside = np.pad(~piece, 1, constant_values=True)
    labels = _label(outside)
    return ~(labels == labels[0, 0])[1:-1, 1:-1]


def _label(silhouette: Silhouette) -> NDArray[np.int64]:
    """Number each 4-connected piece (-1 outside): the smallest pixel index spreads until nothing
    changes.
    """
    far = silhouette.size
    labels = np.where(silhouette, np.arange(far).reshape(silhouette.shape), far)
    while True:
        previous = labels
        for axis in (0, 1):
            for flip in (False, True):
                labels = _sweep(labels, silhouette, axis, flip)
        if np.array_equal(labels, previous):
            return np.where(silhouette, labels, -1)


def _sweep(
    labels: NDArray[np.int64], inside: Silhouette, axis: int, flip: bool
) -> NDArray[np.int64]:
    """Give each pixel the smallest label earlier in its own run along `axis`."""
    labels, inside = np.moveaxis(labels, axis, 0), np.moveaxis(inside, axis, 0)
    if flip:
        labels, inside = labels[::-1], inside[::-1]
    result = labels.copy()
    for i in range(1, len(result)):
        joined = inside[i] & inside[i - 1]
        result[i] = np.where(joined, np.minimum(result[i], result[i - 1]), result[i])
    if flip:
        result = result[::-1]
    return np.moveaxis(result, 0, axis)
