"""The demonstration's pictures: their likeness, and a sheet with a row for each edit and a cell for
each system.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

CELL, GAP = 300, 8
"""Pixels across a picture of the sheet, and between pictures."""
_LINE = 22
"""Pixels down a line of text."""


class SheetRow(NamedTuple):
    """Pictures of one height, CELL pixels wide, under a title."""

    title: str
    cells: Sequence[tuple[str, Image.Image]]
    """Captions and pictures."""

    @property
    def height(self) -> int:
        return 2 * _LINE + self.cells[0][1].height


def sheet(rows: Sequence[SheetRow]) -> Image.Image:
    width = max(len(row.cells) for row in rows) * (CELL + GAP) - GAP
    height = sum(row.height + GAP for row in rows) - GAP
    picture = Image.new("RGB", (width, height), "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(size=14)
    y = 0
    for row in rows:
        draw.text((0, y + 2), row.title, "black", font)
        for column, (caption, part) in enumerate(row.cells):
            x = column * (CELL + GAP)
            draw.text((x, y + _LINE + 2), caption, "black", font)
            picture.paste(part, (x, y + 2 * _LINE))
        y += row.height + GAP
    return picture


def psnr(pixels: npt.NDArray[np.uint8], reference: npt.NDArray[np.uint8]) -> float:
    """Return the likeness of pixels to those of a reference, in dB."""
    error = (pixels.astype(np.float64) - reference) ** 2
    return float(10 * np.log10(255**2 / max(error.mean(), 1e-9)))


def shaded(source: Image.Image, mask: Image.Image) -> Image.Image:
    """Return a picture with a light veil over what is masked."""
    source = source.convert("RGB")
    veiled = Image.composite(Image.new("RGB", source.size, "white"), source, mask)
    return Image.blend(source, veiled, 0.4)
