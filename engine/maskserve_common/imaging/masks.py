"""The tokens that an edit computes and the pixels that it pastes, from a decoded mask.

    mask image ─ rule ─► selected ─ dilate, feather ─► paste weights      at the canvas's size
                                                            │ > 0, of the window
                                                       edit mask          at the model's size
                                                            │ any overlap, grown by the ring
                                                       computed tokens    per token size

Every pixel with a paste weight above 0 lies inside the edit mask, and every edited model pixel
inside a computed token, so each pasted pixel was repainted by the model. Work is confined to the
bounding box of the selected pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from maskserve_common.config import LimitsConfig
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.errors import InvalidRequest
from maskserve_common.imaging.images import DecodedMask, Size, decode_mask
from maskserve_common.imaging.view import Bools, bounding_box, canvas_size, grown

Bytes2D: TypeAlias = npt.NDArray[np.uint8]

UNSELECTED = 127
"""Largest number of a mask's pixel outside it, where masks are rounded to 0 and 255."""
MOST_BOXES = 16
"""Most boxes of one mask."""


def component_boxes(mask: Bytes2D, side: int) -> tuple[tuple[int, int, int, int], ...]:
    """Boxes (top, left, bottom, right) round the connected parts of a mask.

    Parts that touch in a grid of `side` x `side` cells, also at corners, count as one. If there are
    more than MOST_BOXES, one box goes round all of them.
    """
    height, width = mask.shape
    padded = np.pad(mask > 0, ((0, -height % side), (0, -width % side)))
    cells = padded.reshape(padded.shape[0] // side, side, -1, side).any(axis=(1, 3))
    unvisited = {(int(y), int(x)) for y, x in np.argwhere(cells)}
    boxes: list[tuple[int, int, int, int]] = []
    while unvisited and len(boxes) <= MOST_BOXES:
        part = [unvisited.pop()]
        for y, x in part:  # the loop reads the cells that it appends
            near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & unvisited
            unvisited -= near
            part += near
        ys, xs = [y for y, _ in part], [x for _, x in part]
        boxes.append((min(ys) * side, min(xs) * side, (max(ys) + 1) * side, (max(xs) + 1) * side))
    if len(boxes) > MOST_BOXES:
        boxes = [(0, 0, height, width)]
    return tuple(sorted(_tight(mask, box) for box in boxes))


def _tight(mask: Bytes2D, box: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Shrink the box to its nonempty rows and columns; there is at least one."""
    top, left, bottom, right = box
    inside = bounding_box(mask[top:bottom, left:right] > 0, 0)
    assert inside is not None
    rows, columns = inside
    return top + rows.start, left + columns.start, top + rows.stop, left + columns.stop


def grow(part: Bools, before: int, after: int, axis: int) -> Bools:
    """Dilate along one axis: each true element covers `before` places before and `after` behind.

    The reach doubles with each pass, so the cost grows with the logarithm of the distance.
    """
    for reach, step in ((before, -1), (after, 1)):
        extent = 0
        while extent < reach:
            shift = min(extent + 1, reach - extent)
            wider = part.copy()
            ahead, behind = [slice(None)] * 2, [slice(None)] * 2
            ahead[axis], behind[axis] = slice(shift, None), slice(None, -shift)
            target, source = (ahead, behind) if step > 0 else (behind, ahead)
            wider[tuple(target)] |= part[tuple(source)]
            part, extent = wider, extent + shift
    return part


def window_sum(
    counts: npt.NDArray[Any], before: int, after: int, axis: int, dtype: type[np.integer[Any]]
) -> npt.NDArray[Any]:
    """Sum over [i - before, i + after] along one axis; values outside count 0.

    `dtype` need only fit the result: differences are right even if the running sum has wrapped.
    """
    padding = [(0, 0), (0, 0)]
    padding[axis] = (before + 1, after)
    sums = np.pad(counts, padding).cumsum(axis=axis, dtype=dtype)
    length, window = counts.shape[axis], before + after + 1
    high, low = [slice(None)] * 2, [slice(None)] * 2
    high[axis], low[axis] = slice(window, window + length), slice(0, length)
    out: npt.NDArray[Any] = sums[tuple(high)] - sums[tuple(low)]
    return out


def cover(
    values: Bytes2D, size: int, axis: int, *, pixels: int | None = None, spacing: int = 1
) -> Bytes2D:
    """Resample one axis to `size` places, each the maximum of all values that it overlaps.

    Args:
        values: values to resample.
        size: number of places.
        axis: axis of `values`.
        pixels: number of pixels that the values stand for; None: one per value.
        spacing: pixels per value; the last may stand for fewer.
    """
    source = values.shape[axis] if pixels is None else pixels
    if source == size and spacing == 1:
        return values
    # Place j covers [j·source/size, (j+1)·source/size); integers keep the edges exact.
    edges, step = np.arange(size + 1, dtype=np.int64) * source, size * spacing
    first, last = edges[:-1] // step, -(-edges[1:] // step) - 1
    covered: Bytes2D = np.take(values, first, axis=axis)
    for offset in range(1, int((last - first).max()) + 1):
        covered = np.maximum(covered, np.take(values, np.minimum(first + offset, last), axis=axis))
    return covered


WHITE_FROM = 128
"""Luminance from which a mask pixel counts as white."""
COVERS_MOST = 0.9
"""Share of a picture above which a mask is reported to the client."""


@dataclass(frozen=True, slots=True)
class MaskSelection:
    """The selected part of the canvas."""

    pixels: Bools
    """bool [H, W], of the canvas."""
    warnings: tuple[str, ...] = ()
    """Warnings for the client about the mask."""
    strength: Bytes2D | None = None
    """uint8 [H, W], how much of the canvas may change; None: all selected pixels."""


def select(
    raw: bytes | memoryview, settings: EditSettings, limits: LimitsConfig, size: Size
) -> MaskSelection:
    """Return the pixels that a mask selects, including those that the canvas grows by.

    Args:
        raw: bytes of MASK; they may be empty where the canvas grows.
        settings: settings of the edit.
        limits: bounds, checked before decoding.
        size: (height, width) of the image, which the mask must have too.

    Raises:
        InvalidRequest: naming MASK, or the setting.
    """
    expands = any(settings.expand)
    canvas_size(size, settings.expand, limits)
    if expands and not raw:
        return MaskSelection(grown(np.zeros(size, np.bool_), settings.expand, constant_values=True))
    mask, strength = decode_mask(raw, "MASK", limits, size), None
    if settings.mask_mode == "strength":
        for name in ("mask_dilate", "mask_feather"):
            if getattr(settings, name):
                problem = "is given with mask_mode strength"
                raise InvalidRequest(f"SETTINGS.{name}", problem, "0: grey fades out by itself")
        strength = grown(mask.luminance, settings.expand, constant_values=255)
    pixels = selected_pixels(mask, settings.mask_mode)
    warnings = _size_warnings(mask, settings.mask_mode, pixels)
    if expands:
        pixels = grown(pixels, settings.expand, constant_values=True)
    elif not pixels.any():
        raise InvalidRequest(
            "MASK", "selects nothing to edit", _mask_hint(mask, settings.mask_mode)
        )
    return MaskSelection(pixels, warnings, strength)


def _size_warnings(mask: DecodedMask, mode: str, pixels: Bools) -> tuple[str, ...]:
    """Return a warning if the mask selects nearly the whole picture: usually its author meant the
    inverse, as with strokes on a transparent layer.
    """
    share = np.count_nonzero(pixels) / pixels.size
    if share <= COVERS_MOST:
        return ()
    by_alpha = _by_alpha(mask, mode)
    edited = (
        "transparent (alpha 0)" if by_alpha else f"white (luminance {_white_from(mode)} or more)"
    )
    advice = "set SETTINGS.mask_mode to white" if by_alpha else "invert the mask"
    return (
        f"MASK: {share:.0%} of the picture is edited, because the mask is {edited} there; to edit "
        f"the painted part instead, {advice}",
    )


def edit_region(part: Bools, model_size: Size, dilate: int = 0, feather: int = 0) -> Bytes2D:
    """Return a mask that contains the edit mask of a selection, for a fraction of the work.

    The selection is reduced to about the model's size before it grows, so the region reaches up to
    two model pixels farther. It also has the corners of a feathered border, where weights are 0.

    Args:
        part: bool [H, W], selected pixels; at least one is set.
        model_size: (height, width) at which the model works.
        dilate: see `paste_weights`.
        feather: see `paste_weights`.

    Returns:
        uint8 [h, w] of 0 and 255, nowhere below `edit_mask` of its weights.
    """
    source = part.shape
    factor = max(1, min(side // target for side, target in zip(source, model_size, strict=True)))
    for axis in (0, 1):
        if factor > 1:
            part = np.maximum.reduceat(part, np.arange(0, part.shape[axis], factor), axis=axis)
    margin = -(-(dilate + feather) // factor)
    for axis in (0, 1):
        part = grow(part, margin, margin, axis)
    region = part.view(np.uint8)
    for axis, (side, target) in enumerate(zip(source, model_size, strict=True)):
        region = cover(region, target, axis, pixels=side, spacing=factor)
    return _binary(region)


def selected_pixels(mask: DecodedMask, mode: str) -> Bools:
    """Return the pixels that a mask selects, bool [H, W].

    `white`: luminance of at least 128 edits, alpha is ignored. `alpha`: fully transparent edits.
    `auto`: `alpha` if any pixel is at all transparent, else `white`; so an opaque white-on-black
    mask saved with an alpha channel is read as its author sees it. `strength`: any luminance above
    0 edits, alpha is ignored.

    Raises:
        InvalidRequest: the mode is `alpha`, and the mask has no alpha channel.
    """
    if mode == "alpha" and mask.alpha is None:
        raise InvalidRequest(
            "SETTINGS.mask_mode", "is alpha, but MASK has no alpha channel", "white or auto"
        )
    if _by_alpha(mask, mode):
        assert mask.alpha is not None
        transparent: Bools = mask.alpha == 0
        return transparent
    white: Bools = mask.luminance >= _white_from(mode)
    return white


def _white_from(mode: str) -> int:
    return 1 if mode == "strength" else WHITE_FROM


def _by_alpha(mask: DecodedMask, mode: str) -> bool:
    if mask.alpha is None or mode in ("white", "strength"):
        return False
    return mode == "alpha" or int(mask.alpha.min()) < 255


def _mask_hint(mask: DecodedMask, mode: str) -> str:
    """Return in words the masks that select something in this mode."""
    if _by_alpha(mask, mode):
        opaque = mask.alpha is not None and int(mask.alpha.min()) == 255
        hint = ", or SETTINGS.mask_mode white: it is opaque" if opaque else ""
        return f"a mask with fully transparent pixels (alpha 0) where to edit{hint}"
    return f"a mask with white pixels (luminance {_white_from(mode)} or more) where to edit"


def paste_weights(selection: Bools, dilate: int = 0, feather: int = 0) -> Bytes2D | None:
    """Return the weights of edited pixels, uint8 [H, W]: 255 edited, 0 the source as it is, between
    them blended; None: nothing is selected.

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
    wider = core
    for axis in (0, 1):
        wider = grow(wider, before, after, axis)
    # Cut each axis at once: an image of one row has a border of up to a thousand rows.
    columns = window_sum(wider, before, after, 0, np.uint16)[cut[0]]  # each up to feather + 1
    counts = window_sum(columns, before, after, 1, np.int32)[:, cut[1]]
    whole = (feather + 1) ** 2
    weights: Bytes2D = (counts.astype(np.float32) * (255.0 / whole) + 0.5).astype(np.uint8)
    return weights


def _clip(span: slice, margin: int, side: int) -> tuple[slice, slice]:
    """Return where a span widened by `margin` lies in [0, side), and that part of the wide span."""
    low, high = span.start - margin, span.stop + margin
    start, stop = max(0, low), min(side, high)
    return slice(start, stop), slice(start - low, stop - low)


def edit_mask(paste: Bytes2D, model_size: Size) -> Bytes2D:
    """Return the model's mask, uint8 [h, w] of 0 and 255.

    A model pixel is edited if any source pixel under it has a weight above 0; so a mask of one
    pixel never vanishes.
    """
    return _binary(strongest(paste, model_size))


def strongest(values: Bytes2D, model_size: Size) -> Bytes2D:
    """Return the largest value of the source pixels under each model pixel, uint8 [h, w]."""
    for axis, size in enumerate(model_size):
        values = cover(values, size, axis)
    return values


def _binary(values: Bytes2D) -> Bytes2D:
    full: Bytes2D = (values > 0).view(np.uint8) * np.uint8(255)
    return full


TokenIds: TypeAlias = npt.NDArray[np.int64]


def active_tokens(edit: Bytes2D, token_pixels: int, ring: int = 0) -> TokenIds:
    """Return the ids of the computed tokens, ascending: those that overlap the edit mask, and those
    within `ring` tokens of one of them (a square).

    Tokens are numbered row by row, as the model lays out its patches.

    Args:
        edit: [h, w], sides multiples of `token_pixels`; above 0 means edited.
        token_pixels: model pixels along one side of a token.
        ring: width in tokens of the computed ring around the mask, which is not pasted.
    """
    [tokens] = tokens_within(edit, token_pixels, ring)
    return tokens


def tokens_within(edit: Bytes2D, token_pixels: int, *rings: int) -> list[TokenIds]:
    """Return `active_tokens` for each of these rings."""
    grid = _token_grid(edit, token_pixels)
    return [np.flatnonzero(_grown(grid, ring)) for ring in rings]


def _token_grid(edit: Bytes2D, side: int) -> Bools:
    """Whether each token overlaps the edit mask, bool [rows, columns]."""
    height, width = edit.shape
    if height % side or width % side:
        raise ValueError(f"{edit.shape} is not a multiple of {side}")
    rows = edit.reshape(height // side, side, width).max(axis=1)
    grid: Bools = rows.reshape(-1, width // side, side).max(axis=2) > 0
    return grid


def _grown(grid: Bools, ring: int) -> Bools:
    """Add all tokens within `ring` tokens of a computed one."""
    for axis in (0, 1):
        grid = grow(grid, ring, ring, axis)
    return grid


def widened(active: TokenIds, rows: int, columns: int, count: int) -> TokenIds:
    """Return `count` tokens of a grid, or all that it has: the given ones and those nearest to
    them, square ring by square ring.

    Args:
        active: ids of the given tokens, ascending, at least one.
        rows: rows of the grid.
        columns: columns of the grid.
        count: at least the number of given tokens.
    """
    grid = np.zeros((rows, columns), np.bool_)
    grid.flat[active] = True
    while (missing := min(count, grid.size) - np.count_nonzero(grid)) > 0:
        ring = grow(grow(grid, 1, 1, 0), 1, 1, 1) & ~grid
        grid.flat[np.flatnonzero(ring)[:missing]] = True
    return np.flatnonzero(grid)


def cover_a_side(active: TokenIds, rows: int, columns: int) -> bool:
    """Whether tokens cover a whole side of a grid, corner to corner.

    Args:
        active: ids of the tokens, once each.
        rows: rows of the grid.
        columns: columns of the grid.
    """
    ys, xs = np.divmod(active, columns)
    across = (np.count_nonzero(ys == y) == columns for y in (0, rows - 1))
    down = (np.count_nonzero(xs == x) == rows for x in (0, columns - 1))
    return any(across) or any(down)


def active_tokens_per_level(
    edit: Bytes2D, token_pixels: int, levels: Sequence[int], ring: int = 0
) -> dict[int, TokenIds]:
    """Return the computed tokens of a UNet whose stacks attend at several scales.

    Args:
        edit: [h, w] edit mask at the model's size.
        token_pixels: model pixels along one side of a token at level 0.
        levels: number of halvings of each requested level. A side that does not halve evenly
            rounds up, as a convolution of stride 2 with padding 1 does.
        ring: width of the margin round the mask, in tokens of level 0.

    Returns:
        level → ids, row-major over the level's own grid.
    """
    grid = _grown(_token_grid(edit, token_pixels), ring)
    ids_by_level: dict[int, TokenIds] = {}
    for level in range(max(levels) + 1):
        if level in levels:
            ids_by_level[level] = np.flatnonzero(grid)
        grid = np.pad(grid, ((0, grid.shape[0] % 2), (0, grid.shape[1] % 2)))
        grid = grid.reshape(grid.shape[0] // 2, 2, grid.shape[1]).max(axis=1)
        grid = grid.reshape(grid.shape[0], -1, 2).max(axis=2)
    return ids_by_level
