"""Pictures and masks of nodes as pixels."""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from maskserve_common.config import LimitsConfig
from maskserve_common.errors import InvalidRequest
from maskserve_common.imaging.images import decode_image, decode_mask, encode_png

Pixels = npt.NDArray[np.uint8]
Grey = npt.NDArray[np.bool_]
Encoded: TypeAlias = bytes | memoryview
"""A picture's file, or the form of `imaging.images.plain_picture`."""
Box = tuple[int, int, int, int]
"""First and last + 1 row, first and last + 1 column."""
_MOST_RUNS: Final = 2**17
"""Most runs of a mask in all its rows: painted masks have some in each, noise has millions."""


def read_picture(encoded: Encoded, limits: LimitsConfig) -> Pixels:
    """Return the RGB pixels of a picture, [H, W, 3].

    Raises:
        InvalidRequest: it cannot be used.
    """
    return decode_image(encoded, "picture", limits).pixels


def read_mask(encoded: Encoded, limits: LimitsConfig, size: tuple[int, ...] | None = None) -> Grey:
    """Return the white pixels of a mask, [H, W]; `size` is the picture's.

    Raises:
        InvalidRequest: it cannot be used, or has another size.
    """
    expected_size = None if size is None else (size[0], size[1])
    return decode_mask(encoded, "mask", limits, expected_size).luminance > 127


def mask_pixels(white: Grey) -> Pixels:
    """Return a mask [H, W] as pixels: 255 where it is True, else 0."""
    return np.where(white, np.uint8(255), np.uint8(0))


def encode_mask(white: Grey) -> bytes:
    """Return a mask as a PNG."""
    return encode_png(mask_pixels(white))


class Component(NamedTuple):
    """A part of a mask whose pixels are connected by their sides."""

    runs: npt.NDArray[np.int64]
    """Runs, [N, 3], by row and column: row, first column and last + 1 column."""

    @property
    def area(self) -> int:
        """Number of pixels."""
        return int((self.runs[:, 2] - self.runs[:, 1]).sum())

    @property
    def box(self) -> Box:
        rows, begins, ends = self.runs.T
        return int(rows[0]), int(rows[-1]) + 1, int(begins.min()), int(ends.max())

    def white(self, size: tuple[int, ...]) -> Grey:
        """Return a mask of this size, [H, W], with only this part."""
        mask = np.zeros(size, np.bool_)
        for row, begin, end in self.runs.tolist():
            mask[row, begin:end] = True
        return mask


def components(white: Grey) -> list[Component]:
    """Return the connected parts of a mask [H, W], by first row and column.

    Runs of each row are joined with the runs of the row above that they touch.

    Raises:
        InvalidRequest: the mask is noise.
    """
    edges = np.diff(np.pad(white, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    if (count := int(np.count_nonzero(edges == 1))) > _MOST_RUNS:
        raise InvalidRequest("mask", f"is cut {count} times along its rows", f"up to {_MOST_RUNS}")
    table = np.column_stack((*np.nonzero(edges == 1), np.nonzero(edges == -1)[1]))
    runs: list[list[int]] = table.tolist()
    parents = list(range(len(runs)))

    def root(i: int) -> int:
        while parents[i] != i:
            parents[i] = parents[parents[i]]
            i = parents[i]
        return i

    above, first = 0, 0
    for i, (row, begin, end) in enumerate(runs):
        if i and runs[i - 1][0] != row:
            above, first = first, i
        while above < first and (runs[above][0] < row - 1 or runs[above][2] <= begin):
            above += 1  # it touches no later run of this row either
        j = above
        while j < first and runs[j][1] < end:
            low, high = sorted((root(i), root(j)))
            parents[high] = low  # a part's name is its first run
            j += 1
    names = np.array([root(i) for i in range(len(runs))], np.int64)
    order = np.argsort(names, kind="stable")
    begins = np.flatnonzero(np.diff(names[order])) + 1
    return [Component(part_runs) for part_runs in np.split(table[order], begins) if len(part_runs)]
