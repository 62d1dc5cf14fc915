"""What a tile's convolutions and norms read of the template around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from maskserve_engine.cache.store import Handle
from maskserve_engine.families.unet.moments import Moments
from maskserve_engine.families.unet.tile import Frame, Tile


@dataclass(frozen=True, slots=True)
class Around:
    """Of one feature map, for each half of the entry."""

    ring: Tensor
    """[halves, C, n] at the positions of the frame's ring."""
    outside: Moments
    """Of all positions that are not in the box."""


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
        self._around: dict[int, Around] = {}

    def around(self, number: int, level: int, *, strided: bool) -> Around | None:
        """Of the feature map `number`; None: the box is the whole picture.

        Raises:
            EntryLost: as `Handle.wait`.
        """
        entry, place = self._entry(), self.tile[level]
        assert entry is not None, "packed for a step that reads no entry"
        if self._of is not entry:
            self._of = entry
            self._around.clear()
        frame = place.frame(strided=strided)
        if frame.whole:
            return None
        if number not in self._around:
            total = self._total(entry, number, place.size)
            self._around[number] = self._read(entry, number, frame, total)
        return self._around[number]

    def _total(self, entry: Handle, number: int, size: tuple[int, int]) -> Moments:
        """Of the whole map."""
        (coded,) = entry.wait(self._maps.stop, "map")
        halves = len(coded.data) // len(self._maps)
        own = coded.data[number * halves : (number + 1) * halves]
        mean, variance = own.chunk(2, dim=1)
        return Moments(size[0] * size[1], mean, variance)

    def _read(self, entry: Handle, number: int, frame: Frame, total: Moments) -> Around:
        (coded,) = entry.wait(self._maps[number], "map")
        channels = coded.data.shape[1] * (2 if coded.format == "int4" else 1)
        region = coded.data.new_empty(len(coded.data), channels, dtype=self._dtype)
        coded.into(region)
        # [halves, C, positions of the region]
        region = region.unflatten(0, (len(total.mean), -1)).transpose(1, 2)
        ring = region[:, :, frame.ring].contiguous()
        own = frame.box.cut(region.unflatten(2, frame.region.shape))
        return Around(ring, total - Moments.of(own, total.mean.shape[1]))
