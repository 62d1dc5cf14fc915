"""What a tile's convolutions and norms read of the template around it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from maskserve_engine.batch.transfer import copy_tensors, mapped
from maskserve_engine.cache.entries import Coded
from maskserve_engine.cache.store import Handle
from maskserve_engine.families.unet.moments import Moments
from maskserve_engine.families.unet.tile import Tile


@dataclass(frozen=True, slots=True)
class Around:
    """Of one feature map, for each half of the entry."""

    ring: Tensor
    """[halves, C, n] at the positions of the frame's ring."""
    outside: Moments | None
    """Of all positions that are not in the box; None: a strided convolution reads it, no norm."""


class RingRead(NamedTuple):
    """Where something is read round a tile."""

    number: int
    """Of the feature map."""
    level: int
    strided: bool


class Surroundings:
    """A row's tile, and what it reads around it. That is taken from the feature maps once for as
    long as the row reads the same entry.

    Args:
        tile: of the row.
        maps: numbers of the feature maps among the entry's blocks.
        dtype: of the model.
        entry: says which one the row's next step reads.
    """

    def __init__(
        self, tile: Tile, maps: range, dtype: torch.dtype, entry: Callable[[], Handle | None]
    ) -> None:
        self.tile = tile
        self._maps, self._dtype, self._entry = maps, dtype, entry
        self._of: Handle | None = None
        self._moments: Coded
        """[maps · halves, 2 · groups] of all maps of that entry."""
        self._around: dict[RingRead, Around] = {}

    @property
    def shapes(self) -> Hashable:
        """All that the shapes of what is computed and read follow from, but for an entry's
        halves.
        """
        return tuple([level.box.shape for level in self.tile])

    @property
    def entry(self) -> Handle:
        """What the row's next step reads."""
        entry = self._entry()
        assert entry is not None, "packed for a step that reads no entry"
        return entry

    def around(self, number: int, level: int, *, strided: bool) -> Around | None:
        """Of the feature map `number`; None: the box is the whole picture.

        Raises:
            EntryLost: as `Handle.wait`.
        """
        entry, place = self.entry, self.tile[level]
        if self._of is not entry:
            (self._moments,) = entry.wait(self._maps.stop, "map")
            self._of = entry
            self._around.clear()
        read = RingRead(number, level, strided)
        if place.near.whole:
            return None
        if read not in self._around:
            self._around[read] = self._read(entry, read)
        return self._around[read]

    def read(self) -> dict[RingRead, Around]:
        """What was read of this step's entry."""
        return self._around

    def _read(self, entry: Handle, read: RingRead) -> Around:
        place = self.tile[read.level]
        frame = place.frame(strided=read.strided)
        (coded,) = entry.wait(self._maps[read.number], "map")
        halves = len(self._moments.data) // len(self._maps)
        channels = coded.data.shape[1] * (2 if coded.format == "int4" else 1)
        if frame.whole:  # nothing travels, and nothing of it is read
            ring = coded.data.new_zeros(halves, channels, len(frame.ring), dtype=self._dtype)
            return Around(ring, None)
        region = coded.data.new_empty(len(coded.data), channels, dtype=self._dtype)
        coded.into(region)
        # [halves, C, positions of the region]
        region = region.unflatten(0, (halves, -1)).transpose(1, 2)
        ring = region.index_select(2, frame.ring)
        if read.strided:
            return Around(ring, None)
        total = self._total(read.number, place.size)
        own = Moments.of(region.index_select(2, frame.own)[:, :, None], total.mean.shape[1])
        return Around(ring, total - own)

    def _total(self, number: int, size: tuple[int, int]) -> Moments:
        """Of the whole map."""
        own = self._moments.data.unflatten(0, (len(self._maps), -1))[number]
        mean, variance = own.chunk(2, dim=1)
        return Moments(size[0] * size[1], mean, variance)


class HeldSurroundings:
    """Those of a row in tensors of their own, where a recorded step reads them; what others of the
    same shapes have can be copied there.

    Args:
        of: a row's that has taken a step with its entry.
    """

    def __init__(self, of: Surroundings) -> None:
        self.tile, self.shapes = mapped(of.tile, Tensor.clone), of.shapes
        self._around = mapped(of.read(), Tensor.clone)
        self._of = weakref.ref(of.entry)

    def around(self, number: int, level: int, *, strided: bool) -> Around | None:
        return self._around.get(RingRead(number, level, strided))

    def take(self, other: Surroundings) -> None:
        """Have the places of another tile."""
        copy_tensors(self.tile, other.tile)

    def turn_to(self, other: Surroundings) -> None:
        """Have what another row's next step reads; nothing is done where that is so already.

        Raises:
            EntryLost: as `Handle.wait`.
        """
        entry = other.entry
        if self._of() is entry:
            return
        for number, level, strided in self._around:
            other.around(number, level, strided=strided)
        copy_tensors(self._around, {read: other.read()[read] for read in self._around})
        self._of = weakref.ref(entry)
