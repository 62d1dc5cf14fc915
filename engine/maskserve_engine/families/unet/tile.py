"""Where a row's convolutions are computed: at each level the mask's box and a halo round it.

| what a convolution reads          zeros beyond the picture's edge
|   ring: of the template         |
|     box: what is computed       |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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

    def cut(self, x: Any) -> Any:
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
    """What a 3x3 convolution reads, of which a box is computed and the ring round it is not.

    Whatever is not a shape is in tensors: a step is recorded for all tiles of some shapes
    (`graphs`).
    """

    reads: TileBox
    """In the picture and beyond its edges."""
    region: TileBox
    """Of that, what lies in the picture."""
    places: Tensor
    """[positions that are read] where each lies: 0 beyond the picture, behind that those of the
    box, and behind these those of the ring."""
    ring: Tensor
    """[n] of the ring's positions in the region; of those beyond the picture any."""
    own: Tensor
    """[box] of the box's positions in the region."""
    whole: bool
    """Whether nothing is read round the box but what lies beyond the picture."""

    @classmethod
    def of(cls, reads: TileBox, box: TileBox, size: tuple[int, int]) -> Frame:
        """Of a convolution that reads `reads`, of which what lies beyond the picture is 0."""
        region = reads.inside(size)
        inside = np.zeros(reads.shape, np.bool_)
        (region - reads).cut(inside)[:] = True
        in_box = np.zeros(reads.shape, np.bool_)
        (box - reads).cut(in_box)[:] = True
        places, in_region = np.zeros(reads.shape, np.int64), np.zeros(reads.shape, np.int64)
        in_region[inside] = np.arange(region.area)
        places[in_box] = 1 + np.arange(box.area)
        places[~in_box] = 1 + box.area + np.arange(reads.area - box.area)
        places[~inside] = 0
        return cls(
            reads,
            region,
            torch.from_numpy(places.ravel()),
            torch.from_numpy(in_region[~in_box]),
            torch.from_numpy(in_region[in_box]),
            whole=region.area == box.area,
        )

    def paste(self, x: Tensor, ring: Tensor | None) -> Tensor:
        """[p, C, 1, m] the box's [p, C, h, w] and behind it the ring's [1 or p, C, n], if any."""
        flat = x.flatten(2)
        if ring is not None:
            flat = torch.cat((flat, ring.expand(len(x), -1, -1)), dim=2)
        return flat[:, :, None]

    def read(self, pasted: Tensor) -> Tensor:
        """[p, C, what the convolution reads] of what `paste` gave."""
        return _read(pasted.flatten(2), self.places, self.reads.shape)


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
    ids: Tensor
    """The same as a tensor."""
    sources: Tensor
    """Of each position that `near` reads, the one in the next level's box that is upsampled to it;
    at the last level the one in the picture. 0 beyond the picture, others from 1 on."""
    picture: Tensor
    """Of each position that `near` reads, the one in the picture; as `sources`."""

    def frame(self, *, strided: bool) -> Frame:
        return self.strided if strided else self.near

    def of_template(self, *, strided: bool) -> Ids:
        """What is read of the template: nothing where there is nothing round the box."""
        frame = self.frame(strided=strided)
        return np.zeros(0, np.int64) if frame.whole else frame.region.ids(self.size[1])

    def enter(self, sample: Tensor) -> Tensor:
        """[p, C, what a convolution reads] of a map of the whole picture."""
        return _read(sample.flatten(2), self.picture, self.near.reads.shape)

    def upsampled(self, coarse: Tensor) -> Tensor:
        """[p, C, what a convolution reads] of the next level's box, doubled."""
        return _read(coarse.flatten(2), self.sources, self.near.reads.shape)

    def leave(self, x: Tensor) -> Tensor:
        """[p, C, picture] of the box's; what was not computed is 0."""
        out = x.new_zeros(*x.shape[:2], self.size[0] * self.size[1])
        return out.index_copy_(2, self.ids, x.flatten(2)).unflatten(2, self.size)


Tile = tuple[TileLevel, ...]


def _read(flat: Tensor, places: Tensor, shape: tuple[int, int]) -> Tensor:
    """[p, C, shape] of [p, C, m]: 0, or the one of that number, from 1 on."""
    return F.pad(flat, (1, 0)).index_select(2, places).unflatten(2, shape)


def tile_of(
    active: Mapping[int, Ids], sizes: Sequence[tuple[int, int]], halo: int, *, buckets: bool = False
) -> Tile:
    """The tile round a row's active tokens.

    Args:
        active: level → ids; at least one each.
        sizes: of each level.
        halo: at least 1, so that what is upsampled lies in the coarser level's box.
        buckets: whether boxes' sides are those of buckets, so that few shapes are recorded: at most
            an eighth more, or one.
    """
    boxes = [_box(active[level], size, halo) for level, size in enumerate(sizes)]
    if buckets:
        boxes = _bucketed(boxes, sizes)
    levels = []
    for number, (size, box) in enumerate(zip(sizes, boxes, strict=True)):
        reads = TileBox(box.top - 1, box.left - 1, box.bottom + 1, box.right + 1)
        near = strided = Frame.of(reads, box, size)
        picture = sources = _numbers(reads, TileBox(0, 0, *size), size, 1)
        if number + 1 < len(sizes):
            to = boxes[number + 1]
            sources = _numbers(reads, to, size, 2)
            reads = TileBox(2 * to.top - 1, 2 * to.left - 1, 2 * to.bottom, 2 * to.right)
            strided = Frame.of(reads, box, size)
        inside = box.ids(size[1])
        ids = torch.from_numpy(inside)
        levels.append(TileLevel(size, box, near, strided, inside, ids, sources, picture))
    return tuple(levels)


def _numbers(reads: TileBox, box: TileBox, size: tuple[int, int], scale: int) -> Tensor:
    """Of each position of `reads` that lies in the picture the number, from 1 on, of the position
    in `box` that it is taken from, on a level so many times as coarse; 0 of the others.
    """
    rows, columns = np.arange(reads.top, reads.bottom), np.arange(reads.left, reads.right)
    inside = np.logical_and.outer(
        (rows >= 0) & (rows < size[0]), (columns >= 0) & (columns < size[1])
    )
    down, across = rows // scale - box.top, columns // scale - box.left
    numbers = 1 + down[:, None] * box.shape[1] + across
    return torch.from_numpy(np.where(inside, numbers, 0).ravel())


def _box(active: Ids, size: tuple[int, int], halo: int) -> TileBox:
    rows, columns = np.divmod(active, size[1])
    return TileBox(
        int(rows.min()) - halo,
        int(columns.min()) - halo,
        int(rows.max()) + 1 + halo,
        int(columns.max()) + 1 + halo,
    ).inside(size)


def _bucketed(boxes: Sequence[TileBox], sizes: Sequence[tuple[int, int]]) -> list[TileBox]:
    """The same, of sides that buckets have; a coarser one holds what is upsampled to a finer."""
    bucketed: list[TileBox] = []
    for box, size in zip(boxes, sizes, strict=True):
        needed = box
        if bucketed:
            fine = bucketed[-1]
            needed = TileBox(
                min(box.top, max(0, fine.top - 1) // 2),
                min(box.left, max(0, fine.left - 1) // 2),
                min(size[0], max(box.bottom, fine.bottom // 2 + 1)),
                min(size[1], max(box.right, fine.right // 2 + 1)),
            )
        top, bottom = _side(needed.top, needed.bottom, size[0])
        left, right = _side(needed.left, needed.right, size[1])
        bucketed.append(TileBox(top, left, bottom, right))
    return bucketed


def _side(begin: int, end: int, most: int) -> tuple[int, int]:
    """As long as its bucket, and in the picture."""
    step = max(2, 1 << max(0, (end - begin).bit_length() - 4))
    length = min(most, -(-(end - begin) // step) * step)
    begin = min(begin, most - length)
    return begin, begin + length
