"""The view of an edit: the window round the mask that the model sees.

    source ─ expand ─► canvas ─ window ─► the model's size
                          ▲                      │
                          └─────── paste ◄───────┘

The model sees a window at full resolution, or at its own resolution if that is smaller. So the
repainted part of a large photograph is as sharp as the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import numpy.typing as npt

from maskserve_common.contracts.settings import CropMode, EditSettings
from maskserve_common.imaging.images import Size, model_size
from maskserve_common.imaging.masks import Bools, bounding_box

Span = tuple[int, int]
A = TypeVar("A", bound=npt.NDArray[Any])

_CELLS = 8
"""Cells of the grid that windows lie on, along a window's side. Because of the grid, edits near one
another get the same window, and so the same entries; a window is up to a quarter longer."""


class Window(NamedTuple):
    """A part of a canvas, in its pixels."""

    top: int
    left: int
    height: int
    width: int

    @property
    def size(self) -> Size:
        return self.height, self.width

    @property
    def bottom(self) -> int:
        return self.top + self.height

    @property
    def right(self) -> int:
        return self.left + self.width

    def crop(self, picture: A) -> A:
        """Return the window's part of a picture [H, W, …], as a view."""
        part = picture[self.top : self.bottom, self.left : self.right]
        return cast(A, part)


@dataclass(frozen=True, slots=True)
class View:
    """The window of the canvas that the model sees, and the model's input size."""

    canvas: Size
    """(height, width) of the whole canvas."""
    window: Window
    """Part of the canvas that the model sees."""
    size: Size
    """(height, width) of the model's input."""

    @property
    def is_part(self) -> bool:
        return self.window.size != self.canvas


def choose_view(
    selected: Bools, settings: EditSettings, native_resolution: int, multiple: int
) -> View:
    """Choose the window of the canvas that the model sees.

    Args:
        selected: bool [H, W], the selected pixels of the canvas; at least one is set.
        settings: settings of the edit.
        native_resolution: side in pixels of the square that the model was trained for.
        multiple: number of pixels that the model's sides are multiples of.
    """
    box = bounding_box(selected, settings.mask_dilate + settings.mask_feather)
    assert box is not None, "something is selected"
    rows, columns = ((part.start, part.stop) for part in box)
    canvas = selected.shape[0], selected.shape[1]
    window = window_round(
        rows, columns, canvas, native_resolution, settings.crop_to_mask, settings.crop_padding
    )
    return View(canvas, window, model_size(window.size, native_resolution, multiple))


def window_round(
    rows: Span, columns: Span, size: Size, native: int, mode: CropMode, padding: float
) -> Window:
    """Return the window around a mask, or all of the canvas.

    It contains the mask and its padding. If the picture is large enough, the window is at least as
    large as the model's own resolution: the model then sees more at no loss of sharpness.

    Args:
        rows: first and last + 1 row that the mask covers.
        columns: first and last + 1 column that the mask covers.
        size: (height, width) of the canvas.
        native: side in pixels of the square that the model was trained for.
        mode: `auto` takes a window under half of a canvas that is larger than the model's area.
        padding: margin around the mask; below 1 a share of its longer side, from 1 on pixels.
    """
    whole = Window(0, 0, *size)
    if mode == "off" or (mode == "auto" and math.prod(size) <= native**2):
        return whole
    longest = max(rows[1] - rows[0], columns[1] - columns[0])
    margin = math.ceil(padding * longest) if padding < 1 else round(padding)
    cell = 1 << max(0, (max(native, longest + 2 * margin) // _CELLS).bit_length() - 1)
    top, bottom = _spread(rows, margin, size[0], native, cell)
    left, right = _spread(columns, margin, size[1], native, cell)
    window = Window(top, left, bottom - top, right - left)
    small = 2 * math.prod(window.size) < math.prod(size)
    return window if small or mode == "on" else whole


def _spread(span: Span, margin: int, side: int, least: int, cell: int) -> Span:
    """Widen a span by its margin, then to the grid and to `least`, within [0, side)."""
    low = max(0, (span[0] - margin) // cell * cell)
    high = min(side, -((-span[1] - margin) // cell) * cell)
    missing = min(least, side) - (high - low)
    if missing > 0:
        low = max(0, (low - missing // 2) // cell * cell)
        high = max(high, low + min(least, side))
        if high > side:
            low, high = max(0, low - (high - side)), side
    return low, high
