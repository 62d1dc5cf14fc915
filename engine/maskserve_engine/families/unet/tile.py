"""The tile on which a row's convolutions run: at each level the mask's box and a halo round it.

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
PARTS = 4
"""Buckets of a tile's sides, and of its computed tokens, between a power of two and the next."""


@dataclass(frozen=True, slots=True)
class TileBox:
    """A box in a map; `bottom` and `right` are exclusive. It may extend beyond the picture."""

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
        """Return the box's part of [..., h, w]."""
        return x[..., self.top : self.bottom, self.left : self.right]

    def ids(self, width: int) -> Ids:
        """Return [area] positions in a map of that width, row by row."""
        rows, columns = np.arange(self.top, self.bottom), np.arange(self.left, self.right)
        ids: Ids = (rows[:, None] * width + columns).ravel()
        return ids

    def inside(self, size: tuple[int, int]) -> TileBox:
        return TileBox(
            max(0, self.top), max(0, self.left), min(size[0], self.bottom), min(size[1], self.right)
        )

    def __sub__(self, other: TileBox) -> TileBox:
        return TileBox(
            self.top - other.top,
            self.left - other.left,
            self.bottom - other.top,
            self.right - other.left,
        )


@dataclass(frozen=True, slots=True)
class Frame:
    """Inputs of a 3x3 convolution: a computed box and the ring around it, which is not computed.

    Everything but shapes is in tensors: a recorded step serves all tiles of the same shapes
    (`graphs`).
    """

    reads: TileBox
    """Positions that are read, including those beyond the picture's edges."""
    region: TileBox
    """The part of `reads` inside the picture."""
    places: Tensor
    """[positions that are read] source of each: 0 beyond the picture, then positions of the box
    from 1 on, then those of the ring."""
    ring: Tensor
    """[n] ring positions in `region`; arbitrary for those beyond the picture."""
    box: Tensor
    """[box] box positions in `region`."""
    whole: bool
    """Whether the ring lies entirely beyond the picture."""

    @classmethod
    def of(cls, reads: TileBox, box: TileBox, size: tuple[int, int]) -> Frame:
        """Return the frame of a convolution that reads `reads`, with zeros beyond the picture."""
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
        """Return [p, C, 1, m]: the box's [p, C, h, w], then the ring's [1 or p, C, n], if any."""
        flat = x.flatten(2)
        if ring is not None:
            flat = torch.cat((flat, ring.expand(len(x), -1, -1)), dim=2)
        return flat[:, :, None]

    def read(self, pasted: Tensor) -> Tensor:
        """Return [p, C, shape of `reads`] from the result of `paste`."""
        return _read(pasted.flatten(2), self.places, self.reads.shape)


@dataclass(frozen=True, slots=True)
class TileLevel:
    size: tuple[int, int]
    box: TileBox
    near: Frame
    """Frame of a convolution that stays on this level."""
    strided: Frame
    """Frame of the convolution to the next level; equals `near` at the last level."""
    inside: Ids
    """[n] positions of the box, in host memory, where batches are packed."""
    ids: Tensor
    sources: Tensor
    """For each position that `near` reads, the position in the next level's box that is upsampled
    to it, or in the picture at the last level; from 1 on, 0 beyond the picture."""
    picture: Tensor
    """For each position that `near` reads, its position in the picture; from 1 on, 0 beyond it."""

    def frame(self, *, strided: bool) -> Frame:
        return self.strided if strided else self.near

    def of_template(self, *, strided: bool) -> Ids:
        """Return the positions that are read of the template; none if the ring is beyond the
        picture.
        """
        frame = self.frame(strided=strided)
        return np.zeros(0, np.int64) if frame.whole else frame.region.ids(self.size[1])

    def enter(self, sample: Tensor) -> Tensor:
        """Return [p, C, shape that a convolution reads] of a map of the whole picture."""
        return _read(sample.flatten(2), self.picture, self.near.reads.shape)

    def upsampled(self, coarse: Tensor) -> Tensor:
        """Return [p, C, shape that a convolution reads] of the next level's box, upsampled by 2."""
        return _read(coarse.flatten(2), self.sources, self.near.reads.shape)

    def leave(self, x: Tensor) -> Tensor:
        """Return [p, C, picture] from the box; 0 where nothing was computed."""
        out = x.new_zeros(*x.shape[:2], self.size[0] * self.size[1])
        return out.index_copy_(2, self.ids, x.flatten(2)).unflatten(2, self.size)


Tile = tuple[TileLevel, ...]


def _read(flat: Tensor, places: Tensor, shape: tuple[int, int]) -> Tensor:
    """Gather [p, C, shape] from [p, C, m] by positions from 1 on; 0 gives 0."""
    return F.pad(flat, (1, 0)).index_select(2, places).unflatten(2, shape)


def tile_of(
    active: Mapping[int, Ids], sizes: Sequence[tuple[int, int]], halo: int, *, buckets: bool = False
) -> Tile:
    """Return the tile round a row's computed tokens.

    Args:
        active: level → ids; at least one each.
        sizes: size of each level.
        halo: positions round the tokens' box; at least 1, so that upsampled positions lie in
            the coarser level's box.
        buckets: whether sides are rounded up (by a quarter at most, or by 1), so that few
            shapes are recorded.
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
    """Return for each position of `reads` its source in `box`, `scale` times coarser, from 1 on; 0
    for positions beyond the picture.
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
    """Round boxes' sides up to buckets; a coarser box still covers the positions that are upsampled
    to a finer one.
    """
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
    """Return a side rounded up to its bucket, inside the picture."""
    step = max(2, (1 << (end - begin).bit_length() - 1) // PARTS)
    length = min(most, -(-(end - begin) // step) * step)
    begin = min(begin, most - length)
    return begin, begin + length
