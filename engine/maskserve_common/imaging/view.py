"""The view of an edit: its canvas, and the window round the mask that the model sees.

    source ─ expand ─► canvas ─ window ─► the model's size
                          ▲                      │
                          └─────── paste ◄───────┘

The model sees a window at full resolution, or at its own resolution if that is smaller. So the
repainted part of a large photograph is as sharp as the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from maskserve_common.config import LimitsConfig
from maskserve_common.contracts.settings import CropMode, EditSettings, Margins
from maskserve_common.imaging.images import Size, check_size, model_size

Span = tuple[int, int]
A = TypeVar("A", bound=npt.NDArray[Any])
Bools: TypeAlias = npt.NDArray[np.bool_]

_GROWTH = 1.25
"""Ratio of a lattice's length to the next shorter one."""
_UNITS = 8
"""Windows begin at multiples of an eighth of their length."""


def canvas_size(size: Size, margins: Margins, limits: LimitsConfig) -> Size:
    """Return the (height, width) of the canvas, and of the response.

    Args:
        size: size of the source.
        margins: pixels left, top, right and bottom.
        limits: bounds of a picture.

    Raises:
        InvalidRequest: naming SETTINGS.expand.
    """
    left, top, right, bottom = margins
    canvas = size[0] + top + bottom, size[1] + left + right
    if any(margins):
        check_size(canvas, "SETTINGS.expand", limits)
    return canvas


def grown(picture: A, margins: Margins, **how: Any) -> A:
    """Return a picture [H, W, …] at the canvas's size. Its edge pixels are repeated, so that the
    model has a context, unless `how` gives numpy.pad another mode.

    Args:
        picture: pixels of the source's size.
        margins: pixels left, top, right and bottom.
        how: keyword arguments of numpy.pad.
    """
    if not any(margins):
        return picture
    left, top, right, bottom = margins
    around = [(top, bottom), (left, right), *[(0, 0)] * (picture.ndim - 2)]
    return cast(A, np.pad(picture, around, **(how or {"mode": "edge"})))


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


def _span(used: Bools) -> tuple[int, int] | None:
    """[first, last + 1) of the true elements; None when there are none."""
    first = int(used.argmax())
    if not used[first]:
        return None
    return first, len(used) - int(used[::-1].argmax())


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

    The window contains the mask and its padding. Its spans of rows and columns come from a lattice
    (`lattice_span`), so that edits near one another have the same window, and with it the same
    template.

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
    top, bottom = lattice_span((rows[0] - margin, rows[1] + margin), size[0], native)
    left, right = lattice_span((columns[0] - margin, columns[1] + margin), size[1], native)
    window = Window(top, left, bottom - top, right - left)
    small = 2 * math.prod(window.size) < math.prod(size)
    return window if small or mode == "on" else whole


def lattice_span(span: Span, side: int, native: int) -> Span:
    """Return the shortest span of a side's lattice that holds a span, as far as that lies in the
    side.

    Lengths of the lattice are `native`, which costs no sharpness, and then each `_GROWTH` times the
    one before; the last is the whole side. Spans of a length begin at multiples of an eighth of it,
    or end with the side. A span that is held at a multiple of a half or a quarter is held there, so
    that fewer windows serve more edits.
    """
    low, high = max(0, span[0]), min(side, span[1])
    length = min(native, side)
    while length < side:
        last = side - length
        for units in (_UNITS // 2, _UNITS // 4, 1):
            step = max(1, units * (length // _UNITS))
            middle = (low + high - length + step) // (2 * step) * step
            nearest = min(max(0, middle), last)
            start = min((nearest, last), key=lambda at: abs(2 * at + length - low - high))
            if start <= low and high <= start + length:
                return start, start + length
        length = min(side, math.ceil(length * _GROWTH))
    return 0, side
