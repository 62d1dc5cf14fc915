"""The nodes that only compose pictures and masks, with numpy and Pillow. They return pixels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFilter

from maskserve_common.config import LimitsConfig
from maskserve_common.errors import InvalidRequest
from maskserve_common.imaging.images import decode_image, decode_mask, encode_png
from maskserve_common.imaging.masks import bounding_box
from maskserve_workflows.node_request import NodeRequest, one_by_one
from maskserve_workflows.nodes import LIGHT, NODE_TYPES
from maskserve_workflows.plan import MOST
from maskserve_workflows.values import Areas, Judgement

Pixels = npt.NDArray[np.uint8]
Grey = npt.NDArray[np.bool_]
Encoded: TypeAlias = bytes | memoryview
"""A picture's file, or the form of `imaging.images.plain_picture`."""
Box = tuple[int, int, int, int]
"""First and last + 1 row, first and last + 1 column."""
_MOST_RUNS: Final = 2**17
"""Most runs of a mask in all its rows: painted masks have some in each, noise has millions."""
_RIM: Final = 40
"""Difference to a neighbour, of 255, from which a pixel is an edge."""


class PictureNodes:
    """Runs the nodes without weights."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self._nodes: dict[str, Callable[..., Any]] = {
            name: getattr(self, f"_{name}")
            for name, kind in NODE_TYPES.items()
            if kind.model == LIGHT
        }

    def run(self, calls: Sequence[NodeRequest]) -> Iterable[dict[str, Any] | Exception]:
        """Yield each call's outputs."""
        return one_by_one(self._run, calls)

    def _run(self, request: NodeRequest) -> dict[str, Any]:
        kind = NODE_TYPES[request.node]
        outputs = self._nodes[request.node](**request.inputs, **request.settings)
        return dict(outputs) if isinstance(outputs, dict) else {next(iter(kind.outputs)): outputs}

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
