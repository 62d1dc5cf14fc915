"""The template's features round a tile, which its convolutions and norms read."""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from maskserve_engine.batch.graphs import Inputs
from maskserve_engine.batch.step_cache import Entry
from maskserve_engine.batch.transfer import copy_tensors, mapped, to_device
from maskserve_engine.cache.entries import Coded
from maskserve_engine.cache.store import Handle
from maskserve_engine.families.unet.moments import Moments
from maskserve_engine.families.unet.tile import Tile
from maskserve_engine.layers.kernels import has_kernels
from maskserve_engine.layers.read_rings import RingMap, read_rings, ring_table
from maskserve_engine.layers.scatter_kv import missing_kernel
from maskserve_engine.planning.flops import FeatureMap


@dataclass(frozen=True, slots=True)
class Around:
    """Surroundings of a tile in one feature map, for each half of the entry."""

    ring: Tensor
    """[halves, C, n] features at the positions of the frame's ring."""
    outside: Moments | None
    """Moments of all positions outside the box; None: a strided convolution reads the map,
    no norm."""

    def of_passes(self, passes: slice) -> Around:
        """Return the surroundings for some of a row's passes, which may share one half."""
        if len(self.ring) == 1:
            return self
        outside = None if self.outside is None else self.outside.of_passes(passes)
        return Around(self.ring[passes], outside)


class RingRead(NamedTuple):
    """A read of a feature map round a tile."""

    number: int
    level: int
    strided: bool


class RingRoom:
    """Buffers for all surroundings of a tile in one entry."""

    def __init__(
        self,
        tile: Tile,
        maps: Sequence[FeatureMap],
        halves: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._laid = tile, maps, halves
        self.places, rings, moments = self._laid_out(*self._laid)
        self._view(
            torch.empty(rings, dtype=dtype, device=device), torch.empty(moments, device=device)
        )

    def _view(self, rings: Tensor, moments: Tensor) -> None:
        self.rings, self.moments = rings, moments
        tile, maps, halves = self._laid
        self.around: dict[RingRead, Around] = {}
        for read, (ring, outside) in self.places.items():
            feature_map, place = maps[read.number], tile[read.level]
            positions = len(place.frame(strided=read.strided).ring)
            shape = halves, feature_map.width, positions
            ring_view = self.rings[ring : ring + math.prod(shape)].view(shape)
            outside_moments: Moments | None = None
            if not read.strided:
                shape = 2, halves, feature_map.groups
                mean, variance = self.moments[outside : outside + math.prod(shape)].view(shape)
                outside_moments = Moments(math.prod(place.size) - place.box.area, mean, variance)
            self.around[read] = Around(ring_view, outside_moments)

    def placed(self, inputs: Inputs) -> Self:
        """Let the buffers lie among inputs, with unwritten content; return itself."""
        self._view(*(inputs.empty(x, tuple(x.shape)) for x in (self.rings, self.moments)))
        return self

    @staticmethod
    def _laid_out(
        tile: Tile, maps: Sequence[FeatureMap], halves: int
    ) -> tuple[dict[RingRead, tuple[int, int]], int, int]:
        """Return where each ring and its moments begin, and the total elements of both."""
        places: dict[RingRead, tuple[int, int]] = {}
        rings = moments = 0
        for number, feature_map in enumerate(maps):
            if not tile[feature_map.level].near.whole:
                places[RingRead(number, feature_map.level, feature_map.strided)] = rings, moments
                ring = tile[feature_map.level].frame(strided=feature_map.strided).ring
                rings += halves * feature_map.width * len(ring)
                moments += 0 if feature_map.strided else 2 * halves * feature_map.groups
        return places, rings, moments

    @classmethod
    def bytes_of(
        cls, tile: Tile, maps: Sequence[FeatureMap], halves: int, dtype: torch.dtype
    ) -> int:
        _, rings, moments = cls._laid_out(tile, maps, halves)
        return rings * dtype.itemsize + moments * torch.float32.itemsize


class Surroundings(ABC):
    """A row's tile and its surroundings in the next step."""

    def __init__(self, tile: Tile) -> None:
        self.tile = tile

    @property
    def shapes(self) -> Hashable:
        """Key of all shapes that are computed and read, except for the number of halves."""
        return tuple([level.box.shape for level in self.tile])

    @property
    @abstractmethod
    def entry(self) -> object:
        """A different object when something else is read."""

    @abstractmethod
    def around(self, number: int, level: int, *, strided: bool) -> Around | None:
        """Return the surroundings in feature map `number`; None: the box is the whole picture.

        Raises:
            EntryLost: an entry's load failed.
        """

    @abstractmethod
    def read(self) -> Mapping[RingRead, Around]:
        """Return all surroundings read in this step."""

    @abstractmethod
    def room(self) -> RingRoom:
        """Return buffers for the surroundings; something must have been read before."""

    @abstractmethod
    def read_all(self, room: RingRoom) -> bool:
        """Read all surroundings of this step into `room` with few kernels; return False if there
        are no such kernels.

        Raises:
            EntryLost: an entry's load failed.
        """


class TemplateSurroundings(Surroundings):
    """Surroundings in a template's entry, read once per entry: all maps by one kernel, if they have
    arrived on a device with that kernel; else map by map, when the step needs them.
    """

    def __init__(
        self,
        tile: Tile,
        maps: range,
        feature_maps: Sequence[FeatureMap],
        dtype: torch.dtype,
        entry: Callable[[], Entry | None],
    ) -> None:
        super().__init__(tile)
        self._maps, self._feature_maps, self._dtype, self._entry = maps, feature_maps, dtype, entry
        self._of: Handle | None = None
        self._moments: Coded
        """[maps · halves, 2 · groups] moments of all maps of the entry."""
        self._around: dict[RingRead, Around] = {}
        self._room: RingRoom | None = None
        self._whole = False
        """Whether `_room` has all surroundings in `_of`."""

    @property
    def entry(self) -> Handle:
        entry = self._entry()
        assert isinstance(entry, Handle), "packed for a step that reads no entry"
        return entry

    def around(self, number: int, level: int, *, strided: bool) -> Around | None:
        entry, place = self.entry, self.tile[level]
        if self._of is not entry:
            self._turn_to(entry)
        read = RingRead(number, level, strided)
        if place.near.whole:
            return None
        if read not in self._around:
            self._around[read] = self._read(entry, read)
        return self._around[read]

    def read(self) -> Mapping[RingRead, Around]:
        return self._around

    def room(self) -> RingRoom:
        halves, device = len(self._moments.data) // len(self._maps), self._moments.data.device
        return RingRoom(self.tile, self._feature_maps, halves, self._dtype, device)

    def read_all(self, room: RingRoom) -> bool:
        entry = self.entry
        if self._of is not entry:
            self._turn_to(entry, waits=True)
        if self._room is None or not self._whole:
            return False
        room.rings.copy_(self._room.rings)
        room.moments.copy_(self._room.moments)
        return True

    def _read_rings(self, entry: Handle, room: RingRoom) -> bool:
        """Read all surroundings into `room` by one kernel; return False if there is none."""
        ((totals,), _) = entry.wait_whole(self._maps.stop, "map")
        device = totals.data.device
        maps = []
        for read, (to_ring, to_moments) in room.places.items():
            place = self.tile[read.level]
            frame = place.frame(strided=read.strided)
            if frame.whole:  # the ring lies beyond the picture and is not read
                continue
            (coded,), ids = entry.wait_whole(self._maps[read.number], "map")
            box_positions = None if read.strided else frame.box
            maps.append(
                RingMap(
                    coded, ids, frame.region.area, frame.ring, box_positions, math.prod(place.size),
                    read.number, to_ring, to_moments,
                )
            )  # fmt: skip
        formats = {ring_map.coded.format for ring_map in maps}
        if not maps:
            return True
        if len(formats) > 1 or missing_kernel(device, *formats) is not None:
            return False
        [table] = to_device([ring_table(maps)], device)
        halves = len(totals.data) // len(self._maps)
        read_rings(room.rings, room.moments, totals.data, table, halves, *formats)
        return True

    def _turn_to(self, entry: Handle, *, waits: bool = False) -> None:
        """Read another entry, at once if all of its maps are here; `waits`: when they are."""
        self._of, self._around, self._whole = None, {}, False
        ((self._moments,), _) = entry.wait_whole(self._maps.stop, "map")
        if has_kernels(self._moments.data.device) and (waits or self._is_loaded(entry)):
            self._room = self._room or self.room()
            self._whole = self._read_rings(entry, self._room)
            if self._whole:
                self._around = dict(self._room.around)
        self._of = entry

    def _is_loaded(self, entry: Handle) -> bool:
        return all(
            entry.ready(block, "map")
            for block, feature_map in zip(self._maps, self._feature_maps, strict=True)
            if not self.tile[feature_map.level].near.whole
        )

    def _read(self, entry: Handle, read: RingRead) -> Around:
        place = self.tile[read.level]
        frame = place.frame(strided=read.strided)
        (coded,) = entry.wait(self._maps[read.number], "map")
        halves = len(self._moments.data) // len(self._maps)
        channels = coded.data.shape[1] * (2 if coded.format == "int4" else 1)
        if frame.whole:  # the ring lies beyond the picture and is not read
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
        box_moments = Moments.of(region.index_select(2, frame.box)[:, :, None], total.mean.shape[1])
        return Around(ring, total - box_moments)

    def _total(self, number: int, size: tuple[int, int]) -> Moments:
        map_totals = self._moments.data.unflatten(0, (len(self._maps), -1))[number]
        mean, variance = map_totals.chunk(2, dim=1)
        return Moments(size[0] * size[1], mean, variance)


class CopiedSurroundings:
    """Copied surroundings that a recorded step reads; those of other rows of the same shapes are
    copied in.
    """

    def __init__(self, of: Surroundings, inputs: Inputs) -> None:
        self.tile, self.shapes = mapped(of.tile, inputs.copy), of.shapes
        self._room = of.room().placed(inputs)
        self._copy(of)
        self._of: Callable[[], object] = weakref.ref(of.entry)

    def around(self, number: int, level: int, *, strided: bool) -> Around | None:
        return self._room.around.get(RingRead(number, level, strided))

    def take(self, other: Surroundings) -> None:
        """Copy the positions of another tile."""
        copy_tensors(self.tile, other.tile)

    def turn_to(self, other: Surroundings, *, anew: bool) -> None:
        """Copy the surroundings of another row's next step, unless they are here already and
        nothing has overwritten them (`anew`).

        Raises:
            EntryLost: an entry's load failed.
        """
        entry = other.entry
        if self._of() is entry and not anew:
            return
        self._of = lambda: None  # until all of it is copied
        if not other.read_all(self._room):
            for number, level, strided in self._room.around:
                other.around(number, level, strided=strided)
            self._copy(other)
        self._of = weakref.ref(entry)

    def _copy(self, other: Surroundings) -> None:
        arounds = self._room.around
        copy_tensors(arounds, {read: other.read()[read] for read in arounds})
