"""The canvas of an edit: its source with the margins by which it grows."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from maskserve_common.config import LimitsConfig
from maskserve_common.contracts.settings import Margins
from maskserve_common.imaging.images import Size, check_size

A = TypeVar("A", bound=npt.NDArray[Any])


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
