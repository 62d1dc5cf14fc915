"""The nodes that only compose pictures and masks, with numpy and Pillow. They return pixels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Meta
from PIL import Image, ImageFilter

from maskserve_common.errors import InvalidRequest
from maskserve_common.imaging.view import bounding_box
from maskserve_workflows.node_request import ModelSetup, NodeRequest, one_by_one
from maskserve_workflows.node_types import node, node_model, node_type_of
from maskserve_workflows.pictures import (
    Box,
    Encoded,
    Grey,
    Pixels,
    components,
    mask_pixels,
    read_mask,
    read_picture,
)
from maskserve_workflows.plan import MOST
from maskserve_workflows.ports import Mask, Picture, Pictures, Regions, Verdict, Verdicts
from maskserve_workflows.values import Areas, Judgement

_RIM: Final = 40
"""Difference to a neighbour, of 255, from which a pixel is an edge."""
Share = Annotated[float, Meta(ge=0, le=1)]
Distance = Annotated[int, Meta(ge=0, le=512)]
"""Pixels."""


class Best(NamedTuple):
    """The best of several pictures."""

    picture: Picture
    verdict: Verdict


@node(model="pictures", price_s=0.005)
def split(mask: Mask, *, smallest: Share = 0.001, apart: Distance = 16) -> Regions:
    """Split the mask into its connected parts, largest first, without parts below the share
    `smallest` of the picture. Edits of parts may run side by side if their boxes are `apart` pixels
    from one another.
    """
    raise NotImplementedError


@node(model="pictures", price_s=0.005)
def outline(picture: Picture) -> Picture:
    """Draw the edges in the picture, white on black."""
    raise NotImplementedError


@node(model="pictures", price_s=0.005)
def invert(mask: Mask) -> Mask:
    """Invert the mask."""
    raise NotImplementedError


@node(model="pictures", price_s=0.005)
def compose(picture: Picture, parts: Pictures | Sequence[Picture]) -> Picture:
    """Put the changes of each part into the picture; where two parts changed a pixel, the later one
    counts.
    """
    raise NotImplementedError


@node(model="pictures", price_s=0.005)
def crop(picture: Picture, mask: Mask, *, around: Distance = 16) -> Picture:
    """Cut out the mask's bounding box and `around` pixels on each side."""
    raise NotImplementedError


@node(model="pictures", price_s=0.005)
def paste(picture: Picture, part: Picture, mask: Mask, *, around: Distance = 16) -> Picture:
    """Put a part back into the picture, in the place where `crop` cut it out by this mask."""
    raise NotImplementedError


@node(model="pictures", price_s=0.005)
def pad(
    picture: Picture,
    *,
    left: Distance = 0,
    top: Distance = 0,
    right: Distance = 0,
    bottom: Distance = 0,
) -> Picture:
    """Grow the picture by this many pixels on each side, and repeat its border there."""
    raise NotImplementedError


@node(model="pictures", price_s=0.001)
def best(pictures: Pictures | Sequence[Picture], verdicts: Verdicts | Sequence[Verdict]) -> Best:
    """Choose the picture with the highest verdict, or the first of equal ones."""
    raise NotImplementedError


@node_model("pictures")
class PictureNodes:
    """Composes pictures and masks, without weights."""

    def __init__(self, setup: ModelSetup) -> None:
        self._limits = setup.config.limits

    def run(self, calls: Sequence[NodeRequest]) -> Iterable[dict[str, Any] | Exception]:
        """Yield each call's outputs."""
        return one_by_one(self._run, calls)

    def _run(self, request: NodeRequest) -> dict[str, Any]:
        outputs = getattr(self, f"_{request.node}")(**request.inputs, **request.settings)
        if isinstance(outputs, dict):
            return outputs
        [output] = node_type_of(globals()[request.node]).outputs
        return {output: outputs}

    def _picture(self, encoded: Encoded) -> Pixels:
        return read_picture(encoded, self._limits)

    def _mask(self, encoded: Encoded) -> Grey:
        return read_mask(encoded, self._limits)

    def _split(self, mask: Encoded, smallest: float, apart: int) -> Areas:
        white = self._mask(mask)
        parts = [part for part in components(white) if part.area >= smallest * white.size]
        if len(parts) > MOST:
            raise InvalidRequest("mask", f"has {len(parts)} parts", f"up to {MOST}")
        parts.sort(key=lambda part: -part.area)
        waves: list[int] = []
        for i, part in enumerate(parts):
            near = [waves[j] for j in range(i) if _near(parts[j].box, part.box, apart)]
            waves.append(max(near) + 1 if near else 0)
        return Areas(tuple(mask_pixels(part.white(white.shape)) for part in parts), tuple(waves))

    def _outline(self, picture: Encoded) -> Pixels:
        grey = self._picture(picture).astype(np.int16).max(axis=2)
        rims = np.zeros(grey.shape, np.bool_)
        across, down = np.abs(np.diff(grey, axis=1)), np.abs(np.diff(grey, axis=0))
        rims[:, 1:] |= across > _RIM
        rims[1:] |= down > _RIM
        line = Image.fromarray(rims.astype(np.uint8) * 255).filter(ImageFilter.MaxFilter(3))
        return np.repeat(np.asarray(line)[..., None], 3, axis=2)

    def _invert(self, mask: Encoded) -> Pixels:
        return mask_pixels(~self._mask(mask))

    def _compose(self, picture: Encoded, parts: tuple[Encoded, ...]) -> Pixels:
        original = self._picture(picture)
        composed = original.copy()
        for part in parts:
            pixels = self._picture(part)
            _same_size("parts", pixels, original)
            changed = (pixels != original).any(axis=2)
            composed[changed] = pixels[changed]
        return composed

    def _crop(self, picture: Encoded, mask: Encoded, around: int) -> Pixels:
        pixels, white = self._picture(picture), self._mask(mask)
        _same_size("mask", white, pixels)
        return np.ascontiguousarray(pixels[_window(white, around)])

    def _paste(self, picture: Encoded, part: Encoded, mask: Encoded, around: int) -> Pixels:
        pixels, white, part_pixels = (
            self._picture(picture).copy(),
            self._mask(mask),
            self._picture(part),
        )
        _same_size("mask", white, pixels)
        window = _window(white, around)
        _same_size("part", part_pixels, pixels[window])
        pixels[window] = part_pixels
        return pixels

    def _pad(self, picture: Encoded, left: int, top: int, right: int, bottom: int) -> Pixels:
        rim = ((top, bottom), (left, right), (0, 0))
        return np.pad(self._picture(picture), rim, mode="edge")

    def _best(
        self, pictures: tuple[Encoded, ...], verdicts: tuple[Judgement, ...]
    ) -> dict[str, Any]:
        if len(pictures) != len(verdicts) or not pictures:
            raise InvalidRequest(
                "verdicts", f"are {len(verdicts)} for {len(pictures)} pictures", "one for each"
            )
        order = range(len(pictures))
        place = max(order, key=lambda i: (verdicts[i].passed, verdicts[i].score, -i))
        return {"picture": pictures[place], "verdict": verdicts[place]}


def _near(a: Box, b: Box, apart: int) -> bool:
    rows = a[0] - apart < b[1] and b[0] - apart < a[1]
    return rows and a[2] - apart < b[3] and b[2] - apart < a[3]


def _window(white: Grey, around: int) -> tuple[slice, slice]:
    window = bounding_box(white, around)
    if window is None:
        raise InvalidRequest("mask", "is empty", "a mask with some white")
    return window


def _same_size(port: str, array: npt.NDArray[Any], reference: npt.NDArray[Any]) -> None:
    if array.shape[:2] != reference.shape[:2]:
        (h, w), (height, width) = array.shape[:2], reference.shape[:2]
        raise InvalidRequest(port, f"is {w}x{h}", f"{width}x{height}, as the picture")
