"""Where a row's convolutions are computed: at each level the mask's box and a halo round it.

| region: what a convolution reads          zeros beyond the picture's edge
|   ring: of the template                 |
|     box: what is computed               |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TileBox:
    """Positions of a map: rows `top` to `bottom`, columns `left` to `right`, the last ones not."""

    top: int
    left: int
    bottom: int
    right: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.bottom - self.top, self.right - self.left

    @property
    def area(self) -> int:
        height, width = self.shape
        return height * width

    def cut(self, x: Tensor) -> Tensor:
        """Its positions of [..., h, w]."""
        return x[..., self.top : self.bottom, self.left : self.right]

    def ids(self, width: int) -> Ids:
        """[area] of its positions in a map so wide, row by row."""
        rows, columns = np.arange(self.top, self.bottom), np.arange(self.left, self.right)
        ids: Ids = (rows[:, None] * width + columns).ravel()
        return ids

    def inside(self, size: tuple[int, int]) -> TileBox:
        """What of it lies in the picture."""
        return TileBox(
            max(0, self.top), max(0, self.left), min(size[0], self.bottom), min(size[1], self.right)
        )

    def __sub__(self, other: TileBox) -> TileBox:
        """In the coordinates of a box that holds it."""
        return TileBox(
            self.top - other.top,
            self.left - other.left,
            self.bottom - other.top,
            self.right - other.left,
        )


@dataclass(frozen=True, slots=True)
class Frame:
    """What a 3x3 convolution reads: a region of a map, of which a box is computed."""

    region: TileBox
    """In the picture."""
    box: TileBox
    """In the region."""
    ring: Tensor
    """[n] positions of the region that are not in the box."""
    zeros: tuple[int, int, int, int]
    """Positions that the convolution reads beyond the picture's edges, as `F.pad` takes them."""

    @classmethod
    def of(cls, reads: TileBox, box: TileBox, size: tuple[int, int]) -> Frame:
        """Of a convolution that reads `reads`, of which what lies beyond the picture is 0."""
        region = reads.inside(size)
        own = box - region
        outside = np.ones(region.shape, np.bool_)
        outside[own.top : own.bottom, own.left : own.right] = False
        zeros = (
            region.left - reads.left,
            reads.right - region.right,
            region.top - reads.top,
            reads.bottom - region.bottom,
        )
        return cls(region, own, torch.from_numpy(np.flatnonzero(outside)), zeros)

    @property
    def whole(self) -> bool:
        """Whether nothing is read round the box."""
        return not len(self.ring)

    def paste(self, x: Tensor, ring: Tensor) -> Tensor:
        """[p, C, region] of the box's [p, C, h, w], and of the ring's [1 or p, C, n]."""
        if self.whole:
            return x
        wide = x.new_empty(*x.shape[:2], *self.region.shape)
        wide.flatten(2)[:, :, self.ring] = ring
        self.box.cut(wide).copy_(x)
        return wide

    def pad(self, x: Tensor) -> Tensor:
        """[p, C, what the convolution reads] of [p, C, region]."""
        return F.pad(x, self.zeros) if any(self.zeros) else x


@dataclass(frozen=True, slots=True)
class TileLevel:
    """A tile at one level."""

    size: tuple[int, int]
    """Of the picture."""
    box: TileBox
    near: Frame
    """Of a convolution that stays on this level."""
    strided: Frame
    """Of the convolution that leads to the next level; as `near` at the last one."""
    inside: Ids
    """[n] of the box's positions, in host memory: batches are packed there."""

    def frame(self, *, strided: bool) -> Frame:
        return self.strided if strided else self.near

    def ids(self, *, strided: bool) -> Ids:
        """What is read of the template: nothing where the box is the whole picture."""
        frame = self.frame(strided=strided)
        return np.zeros(0, np.int64) if frame.whole else frame.region.ids(self.size[1])


Tile = tuple[TileLevel, ...]


def tile_of(active: Mapping[int, Ids], sizes: Sequence[tuple[int, int]], halo: int) -> Tile:
    """The tile round a row's active tokens.

    Args:
        active: level → ids; at least one each.
        sizes: of each level.
        halo: at least 1, so that what is upsampled lies in the coarser level's box.
    """
    boxes = [_box(active[level], size, halo) for level, size in enumerate(sizes)]
    levels = []
    for number, (size, box) in enumerate(zip(sizes, boxes, strict=True)):
        reads = TileBox(box.top - 1, box.left - 1, box.bottom + 1, box.right + 1)
        near = strided = Frame.of(reads, box, size)
        if number + 1 < len(sizes):
            to = boxes[number + 1]
            reads = TileBox(2 * to.top - 1, 2 * to.left - 1, 2 * to.bottom, 2 * to.right)
            strided = Frame.of(reads, box, size)
        levels.append(TileLevel(size, box, near, strided, box.ids(size[1])))
    return tuple(levels)


def _box(active: Ids, size: tuple[int, int], halo: int) -> TileBox:
    rows, columns = np.divmod(active, size[1])
    return TileBox(
        int(rows.min()) - halo,
        int(columns.min()) - halo,
        int(rows.max()) + 1 + halo,
        int(columns.max()) + 1 + halo,
    ).inside(size)
