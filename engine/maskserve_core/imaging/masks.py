"""From a decoded mask to what is computed and what is pasted back.

    mask image ─ rule ─► selected ─ dilate, feather ─► paste weights      at the source's size
                                                            │ > 0
                                                       edit mask          at the model's size
                                                            │ any overlap, grown by the ring
                                                       active tokens      per token size

Every pixel with a paste weight above 0 lies inside the edit mask, and every edited model pixel
inside an active token, so nothing is ever pasted that the model did not repaint. Work is confined
to the bounding box of what is selected.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from maskserve_core.errors import InvalidRequest
from maskserve_core.imaging.geometry import Size
from maskserve_core.imaging.images import DecodedMask, wrong_size
from maskserve_core.imaging.morphology import (
    Bools,
    Bytes2D,
    bounding_box,
    cover,
    grow,
    window_sum,
)

WHITE_FROM = 128
"""Luminance from which a mask pixel counts as white."""


@dataclass(frozen=True, slots=True)
class Masks:
    """What one mask asks for."""

    paste: Bytes2D
    """uint8 [H, W] at the source's size: 255 edited, 0 the source as it is, between: blended."""
    edit: Bytes2D
    """uint8 [h, w] at the model's size: 255 edited, 0 kept."""


def build_masks(
    mask: DecodedMask,
    source_size: Size,
    model_size: Size,
    mode: str = "auto",
    dilate: int = 0,
    feather: int = 0,
) -> Masks:
    """All of a mask's derived arrays.

    Args:
        mask: decoded mask.
        source_size: (height, width) of the image, which the mask must have too.
        model_size: (height, width) at which the model works.
        mode: `white`, `alpha` or `auto`, see `selected`.
        dilate: pixels by which the selection grows, at the source's size.
        feather: pixels beyond the grown selection over which the edit fades out.

    Raises:
        InvalidRequest: naming MASK or SETTINGS.mask_mode.
    """
    height, width = mask.luminance.shape
    if (height, width) != source_size:
        raise wrong_size("MASK", (height, width), source_size)
    paste = paste_weights(selected(mask, mode), dilate, feather)
    if paste is None:
        raise InvalidRequest("MASK", "selects nothing to edit", _accepted(mask, mode))
    return Masks(paste, edit_mask(paste, model_size))


def selected(mask: DecodedMask, mode: str) -> Bools:
    """The pixels a mask selects, bool [H, W].

    `white`: luminance of at least 128 edits, alpha is ignored. `alpha`: fully transparent edits.
    `auto`: `alpha` if any pixel is at all transparent, else `white`; so an opaque white-on-black
    mask saved with an alpha channel is read as its author sees it.

    Raises:
        InvalidRequest: `alpha` asked of a mask without transparency.
    """
    if mode == "alpha" and mask.alpha is None:
        raise InvalidRequest(
            "SETTINGS.mask_mode", "is alpha, but MASK has no alpha channel", "white or auto"
        )
    if _by_alpha(mask, mode):
        assert mask.alpha is not None
        transparent: Bools = mask.alpha == 0
        return transparent
    white: Bools = mask.luminance >= WHITE_FROM
    return white


def _by_alpha(mask: DecodedMask, mode: str) -> bool:
    if mask.alpha is None or mode == "white":
        return False
    return mode == "alpha" or int(mask.alpha.min()) < 255


def _accepted(mask: DecodedMask, mode: str) -> str:
    if _by_alpha(mask, mode):
        return "a mask with fully transparent pixels (alpha 0) where to edit"
    return f"a mask with white pixels (luminance {WHITE_FROM} or more) where to edit"


def paste_weights(selection: Bools, dilate: int = 0, feather: int = 0) -> Bytes2D | None:
    """Weights of the edited pixels, uint8 [H, W]; None when nothing is selected.

    The selection grows by a square of `dilate` pixels to each side. Beyond it the weight falls
    linearly from 255 to 0 over `feather` pixels along each axis; inside it stays 255.
    """
    box = bounding_box(selection, dilate)
    if box is None:
        return None
    weights = np.zeros(selection.shape, np.uint8)
    part = selection[box]
    for axis in (0, 1):
        part = grow(part, dilate, dilate, axis)
    if not feather:
        np.multiply(part, np.uint8(255), out=weights[box])
        return weights
    place, cut = zip(
        *(_clip(span, feather, side) for span, side in zip(box, selection.shape, strict=True)),
        strict=True,
    )
    weights[place] = _fade(np.pad(part, feather), feather, cut)
    return weights


def _fade(core: Bools, feather: int, cut: tuple[slice, ...]) -> Bytes2D:
    """Weights in the part `cut` of `core`, which has `feather` empty pixels around it.

    Growing by a window and averaging over the same window leaves 1 wherever the core was, falls
    linearly to 0 over the window's length, and costs the same for any length. The empty border
    lets a core that touches the image's edge grow beyond it, so that it does not fade there.
    """
    before = feather // 2
    after = feather - before
    grown = core
    for axis in (0, 1):
        grown = grow(grown, before, after, axis)
    # Cut as soon as an axis is done: an image one pixel high has a border of a thousand rows.
    columns = window_sum(grown, before, after, 0, np.uint16)[cut[0]]  # each up to feather + 1
    counts = window_sum(columns, before, after, 1, np.int32)[:, cut[1]]
    whole = (feather + 1) ** 2
    weights: Bytes2D = (counts.astype(np.float32) * (255.0 / whole) + 0.5).astype(np.uint8)
    return weights


def _clip(span: slice, margin: int, side: int) -> tuple[slice, slice]:
    """Where a span widened by `margin` lies in [0, side), and that part of the wide span."""
    low, high = span.start - margin, span.stop + margin
    start, stop = max(0, low), min(side, high)
    return slice(start, stop), slice(start - low, stop - low)


def edit_mask(paste: Bytes2D, model_size: Size) -> Bytes2D:
    """The model's mask, uint8 [h, w] of 0 and 255.

    A model pixel is edited if any source pixel under it has a weight above 0; so a mask of one
    pixel never vanishes.
    """
    if paste.shape == model_size:
        return _full(paste)
    covered = paste
    for axis, size in enumerate(model_size):
        covered = cover(covered, size, axis)
    return _full(covered)


def _full(values: Bytes2D) -> Bytes2D:
    """255 where `values` is above 0."""
    full: Bytes2D = (values > 0).view(np.uint8) * np.uint8(255)
    return full
