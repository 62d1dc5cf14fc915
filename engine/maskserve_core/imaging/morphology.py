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
