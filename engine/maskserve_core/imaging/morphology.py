"""Masks as plain arrays: their bounding box, grown, summed over windows, resampled."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes2D: TypeAlias = npt.NDArray[np.uint8]
Bools: TypeAlias = npt.NDArray[np.bool_]


def bounding_box(selection: Bools, margin: int) -> tuple[slice, slice] | None:
    rows = _span(selection.any(axis=1))
    if rows is None:
        return None
    columns = _span(selection[rows[0] : rows[1]].any(axis=0))
    assert columns is not None
    return tuple(  # type: ignore[return-value]
        slice(max(0, low - margin), min(side, high + margin))
        for (low, high), side in zip((rows, columns), selection.shape, strict=True)
    )


MOST_BOXES = 16


def component_boxes(mask: Bytes2D, side: int) -> tuple[tuple[int, int, int, int], ...]:
    """Boxes (top, left, bottom, right) round the connected parts of a mask.

    What touches within a grid of `side` x `side` cells, corners too, is one part. Of more than
    MOST_BOXES parts there is one box round them all.
    """
    height, width = mask.shape
    padded = np.pad(mask > 0, ((0, -height % side), (0, -width % side)))
    cells = padded.reshape(padded.shape[0] // side, side, -1, side).any(axis=(1, 3))
    left = {(int(y), int(x)) for y, x in np.argwhere(cells)}
    found: list[tuple[int, int, int, int]] = []
    while left and len(found) <= MOST_BOXES:
        part = [left.pop()]
        for y, x in part:  # grows while it is read
            near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & left
            left -= near
            part += near
        ys, xs = [y for y, _ in part], [x for _, x in part]
        found.append((min(ys) * side, min(xs) * side, (max(ys) + 1) * side, (max(xs) + 1) * side))
    if len(found) > MOST_BOXES:
        found = [(0, 0, height, width)]
    return tuple(sorted(_tight(mask, box) for box in found))


def _tight(mask: Bytes2D, box: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """The box without rims that hold nothing; it holds something."""
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
        done = 0
        while done < reach:
            shift = min(done + 1, reach - done)
            grown = part.copy()
            ahead, behind = [slice(None)] * 2, [slice(None)] * 2
            ahead[axis], behind[axis] = slice(shift, None), slice(None, -shift)
            to, source = (ahead, behind) if step > 0 else (behind, ahead)
            grown[tuple(to)] |= part[tuple(source)]
            part, done = grown, done + shift
    return part


def window_sum(
    counts: npt.NDArray[Any], before: int, after: int, axis: int, dtype: type[np.integer[Any]]
) -> npt.NDArray[Any]:
    """Sum over [i - before, i + after] along one axis; what lies outside counts 0.

    `dtype` need only hold the result: differences are right where the running sum has wrapped.
    """
    padding = [(0, 0), (0, 0)]
    padding[axis] = (before + 1, after)
    sums = np.pad(counts, padding).cumsum(axis=axis, dtype=dtype)
    length, window = counts.shape[axis], before + after + 1
    high, low = [slice(None)] * 2, [slice(None)] * 2
    high[axis], low[axis] = slice(window, window + length), slice(0, length)
    out: npt.NDArray[Any] = sums[tuple(high)] - sums[tuple(low)]
    return out


def cover(values: Bytes2D, size: int, axis: int) -> Bytes2D:
    """Resample one axis to `size` places, each the maximum of all that it overlaps."""
    source = values.shape[axis]
    if source == size:
        return values
    # Place j covers [j·source/size, (j+1)·source/size); integers keep the edges exact.
    edges = np.arange(size + 1, dtype=np.int64) * source
    first, last = edges[:-1] // size, -(-edges[1:] // size) - 1
    covered: Bytes2D = np.take(values, first, axis=axis)
    for offset in range(1, int((last - first).max()) + 1):
        covered = np.maximum(covered, np.take(values, np.minimum(first + offset, last), axis=axis))
    return covered


def _span(used: Bools) -> tuple[int, int] | None:
    """[first, last + 1) of the true elements; None when there are none."""
    first = int(used.argmax())
    if not used[first]:
        return None
    return first, len(used) - int(used[::-1].argmax())
