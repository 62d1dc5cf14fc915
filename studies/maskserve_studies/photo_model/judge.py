"""Judge an edit of a photograph: its rim, its likeness, its word.

Numpy and Pillow only.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from maskserve_benchmarks.demo_model.scenes import Mask, Picture, fill
from maskserve_studies.photo_model.scenes import Stock, Textures, look_of, material
from maskserve_studies.photo_model.words import MATERIALS, MORE, NOTHING, Wish, wishes

_JUDGED_SIDE: Final = 96  # larger side, in pixels, of pictures for the judge of words
_COARSE: Final = 3  # side of the blocks that it compares, in pixels
_ROUGH: Final = 0.3  # share of a material's roughness; a surface below it is plain
_TOLERANCE: Final = 16.0  # of 255: distance of a good answer's colours from the ideal ones


def rim_step(picture: Picture, mask: Mask) -> float:
    """Mean difference, 0..255, of the pixels on both sides of the region's rim; 0 without one."""
    values = picture.astype(np.float32)
    total, count = 0.0, 0
    for axis in (0, 1):
        across = np.diff(mask.astype(np.int8), axis=axis) != 0
        steps = np.abs(np.diff(values, axis=axis)).mean(axis=2)
        total, count = total + float(steps[across].sum()), count + int(across.sum())
    return total / count if count else 0.0


def psnr(edited: Picture, target: Picture, mask: Mask) -> float:
    """Peak signal-to-noise ratio inside the region in dB; infinite where all is equal."""
    error = (edited.astype(np.float64) - target)[mask]
    mean = float(np.square(error).mean()) if error.size else 0.0
    return math.inf if mean == 0 else 10 * math.log10(255**2 / mean)


def recognise(edited: Picture, source: Picture, mask: Mask, textures: Textures) -> Wish:
    """The wish whose ideal answer is nearest to the region. A material without texture counts as
    none.
    """
    height, width = mask.shape
    scale = _JUDGED_SIDE / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    small, small_source = (
        np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BOX))
        for picture in (edited, source)
    )
    part = Image.fromarray(mask.astype(np.uint8) * 255).resize(size, Image.Resampling.BOX)
    region = np.asarray(part) >= 128
    if not region.any():
        raise ValueError("mask: no pixel of it is left at the judge's size; accepted: larger ones")
    behind = fill(small_source, region)
    stock = Stock([], textures)
    colours, contrast = _blocks(small, region)
    errors = {}
    for wish in wishes():
        if wish.thing == MORE:
            continue
        rgb, alpha = look_of(wish, region, stock, np.random.default_rng(0))
        spread, rough = 0.0, np.zeros(())
        if wish.look in MATERIALS:  # the places of its stones do not count
            means, deviations = _blocks(rgb, np.ones_like(region))
            spread, rough = float(means.var(axis=(0, 1)).mean()), deviations.mean(axis=(0, 1))
            rgb = np.broadcast_to(rgb.mean(axis=(0, 1)), rgb.shape)
        share = np.broadcast_to(alpha[..., None], rgb.shape)
        ideal, edges = _blocks(behind + (rgb - behind) * share, region)
        covered = _blocks(share, region)[0]
        variance = _TOLERANCE**2 + spread * covered**2
        errors[wish] = float(
            (np.square(colours - ideal) / variance + np.log(variance)).mean()
            + (np.square(contrast - np.maximum(edges, rough * covered)) / _TOLERANCE**2).mean()
        )
    best = min(errors, key=lambda wish: errors[wish])
    if best.look in MATERIALS:
        surface = material(np.random.default_rng(0), best.look, (height, width), stock)
        if _roughness(edited, mask) < _ROUGH * _roughness(surface, np.ones_like(mask)):
            return Wish(NOTHING)
    return best


def _roughness(picture: NDArray[np.generic], mask: Mask) -> float:
    """Mean difference of neighbours in a row that are both inside the region."""
    steps = np.abs(np.diff(picture.astype(np.float32), axis=1)).mean(axis=2)
    inside = mask[:, 1:] & mask[:, :-1]
    return float(steps[inside].mean()) if inside.any() else 0.0


def _blocks(picture: NDArray[Any], region: Mask) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and deviation of each colour in blocks of the region, black elsewhere."""
    height, width = (side // _COARSE * _COARSE for side in region.shape)
    blocks = (picture * region[..., None])[:height, :width].reshape(
        height // _COARSE, _COARSE, width // _COARSE, _COARSE, 3
    )
    return blocks.mean(axis=(1, 3), dtype=np.float64), blocks.std(axis=(1, 3), dtype=np.float64)
