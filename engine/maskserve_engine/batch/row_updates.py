"""LoRA updates of packed rows: by kernels on CUDA, as grouped products elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy as copy_of
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple, Self, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskserve_engine.batch.transfer import copy_tensors, to_device
from maskserve_engine.layers.attention import Span
from maskserve_engine.layers.kernels import has_kernels
from maskserve_engine.layers.linear import Linear, map_linears
from maskserve_engine.layers.low_rank import (
    Adapters,
    LowRank,
    LowRankConv,
    low_rank,
    low_rank_conv,
)
from maskserve_engine.layers.shrink_expand import FIELDS, add_map_slices, add_slices, tiles_of

LEAST_SLOTS = 32
"""Slices of a LoRA of 128 ranks at a product of four layers."""


class RowUpdates:
    """The updates of a batch's rows at every place of the weights."""

    def __init__(self, rows: Sequence[Adapters], device: torch.device) -> None:
        self._rows = rows
        self._tables = update_tables(rows, device) if has_kernels(device) else None
        self._tiles = Tiles(device)

    @property
    def shapes(self) -> Hashable | None:
        """Key of all shapes; None: the host composes the updates at each step."""
        return None if self._tables is None else self._tables.shapes

    def linear(self, place: str, base: Linear) -> Linear:
        """Return the product at a place of the weights, with these updates in place of others."""
        base = base.base if isinstance(base, ByRow) else base
        if self._tables is None:
            return low_rank(place, base, self._rows)
        table = self._tables.at(place)
        return base if table is None else FusedLowRank(base, table, table.rows, self._tiles)

    def conv(self, place: str, base: nn.Conv2d) -> LowRankConv | FusedLowRankConv | None:
        """Return the convolution at a place, with the passes' updates added; None: no pass
        has any.
        """
        if self._tables is None:
            return low_rank_conv(place, base, self._rows)
        table = self._tables.at(place)
        return None if table is None else FusedLowRankConv(base, table, table.rows, self._tiles)

    def copied(self, copy: Callable[[Tensor], Tensor], moving: Sequence[MovingRows]) -> RowUpdates:
        """Return the updates on copied tables, which serve any rows' updates of these shapes
        (`take`).

        Args:
            copy: copies a tensor.
            moving: streams whose rows have other lengths in other steps of these shapes.
        """
        assert self._tables is not None, "grouped products are not recorded"
        updates = copy_of(self)
        updates._tables = self._tables.copied(copy)
        updates._tiles = replace(self._tiles, moving=tuple(moving))
        return updates

    def take(self, other: RowUpdates) -> None:
        """Copy other updates of the same shapes into these tables."""
        copy_tensors(self._tables, other._tables)


class UpdateTable(NamedTuple):
    """Updates at one place."""

    slices: Tensor
    """[S, FIELDS] int64 slices of all rows, concatenated; unused ones follow."""
    scales: Tensor
    """[S] float32."""
    ends: Tensor
    """[R + 2] int64: 0, the end of each row's slices, and once more the last one."""
    most: int
    """Slots of a row, as in a recorded step: its kernels are compiled before."""
    rows: tuple[int | None, ...]
    """Number of each row; None: it has no update here."""


@dataclass(frozen=True, slots=True)
class UpdateTables:
    """Updates of R rows at P places. Behind the rows stands one without updates: the pads of a
    padded step.
    """

    places: Mapping[str, int]
    """Number of each place."""
    slots: int
    """Slices that each row may have at a place (`slots_for`)."""
    counts: tuple[tuple[int, ...], ...]
    """By place and row, the number of slices."""
    slices: Tensor
    """[P, R · slots, FIELDS] int64."""
    scales: Tensor
    """[P, R · slots] float32."""
    ends: Tensor
    """[P, R + 2] int64."""

    @property
    def shapes(self) -> Hashable:
        return tuple(self.places), self.slots, self.ends.shape

    def at(self, place: str) -> UpdateTable | None:
        number = self.places.get(place)
        if number is None:
            return None
        counts = self.counts[number]
        rows = tuple([row if count else None for row, count in enumerate(counts)])
        tensors = self.slices[number], self.scales[number], self.ends[number]
        return UpdateTable(*tensors, self.slots, rows)

    def copied(self, copy: Callable[[Tensor], Tensor]) -> UpdateTables:
        """Return copied tables in which each row may have updates at each place."""
        counts = tuple([(self.slots,) * len(of_place) for of_place in self.counts])
        tensors = map(copy, (self.slices, self.scales, self.ends))
        return UpdateTables(self.places, self.slots, counts, *tensors)


def slots_for(slices: int) -> int:
    """Return the next of few numbers of slices, so that one recorded step serves LoRAs of many
    ranks; slots without a slice take next to no time.
    """
    slots = LEAST_SLOTS
    while slots < slices:
        slots *= 4
    return slots


def update_tables(rows: Sequence[Adapters], device: torch.device) -> UpdateTables:
    """Return the rows' updates, moved to the device in one transfer."""
    places = sorted({place for row in rows for updates, _ in row for place in updates.slices})
    counts = tuple(
        [
            tuple([sum(len(updates.slices.get(place, ())) for updates, _ in row) for row in rows])
            for place in places
        ]
    )
    slots = slots_for(max(map(max, counts), default=0))
    slices = np.zeros((len(places), len(rows) * slots, FIELDS), np.int64)
    scales = np.zeros(slices.shape[:2], np.float32)
    for place, of_slices, of_scales in zip(places, slices, scales, strict=True):
        begin = 0
        for updates, scale in chain.from_iterable(rows):
            update = updates.slices.get(place)
            if update is not None:
                end = begin + len(update)
                of_slices[begin:end], of_scales[begin:end] = update, scale
                begin = end
    ends = np.zeros((len(places), len(rows) + 2), np.int64)
    ends[:, 1:-1] = np.cumsum(counts, axis=1)
    ends[:, -1] = ends[:, -2]
    tensors = to_device([*map(torch.from_numpy, (slices, scales, ends))], device)
    numbers = {place: number for number, place in enumerate(places)}
    return UpdateTables(numbers, slots, counts, *tensors)


class MovingRows(NamedTuple):
    """A stream of a padded step, whose rows move: it is known by the object of its spans, since
    their values are those of the rows that it was recorded for.
    """

    spans: Sequence[Span]
    tiles: Tensor
    """Tiles of all rows (`shrink_expand.padded_tiles`)."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tokens of each program: [T, 3] row of the table, first token, end. Kept with a batch, so that
    a steady step transfers none.
    """

    device: torch.device
    moving: tuple[MovingRows, ...] = ()
    _known: dict[object, Tensor] = field(default_factory=dict)

    def of(
        self, spans: Sequence[Span], rows: Sequence[int | None], length: int, copies: int
    ) -> Tensor:
        """Return the tiles of rows packed in `spans`, repeated `copies` times.

        Args:
            spans: [begin, end) of each row.
            rows: row of the table for each packed row; None: no update.
            length: tokens of one copy.
            copies: number of copies, concatenated.
        """
        for stream in self.moving:
            if stream.spans is spans:
                return stream.tiles
        key = tuple(spans), tuple(rows), length, copies
        tile_table = self._known.get(key)
        if tile_table is None:
            copied_spans = [
                (shift + begin, shift + end)
                for shift in range(0, copies * length, length)
                for begin, end in spans
            ]
            [tile_table] = to_device([tiles_of(copied_spans, tuple(rows) * copies)], self.device)
            self._known[key] = tile_table
        return tile_table


@dataclass(frozen=True, slots=True)
class FusedLowRank:
    """`LowRank` as two kernels for all rows."""

    base: Linear
    table: UpdateTable
    rows: tuple[int | None, ...]
    """Row of the table, by packed row; None: it has no update."""
    tiles: Tiles
    first: int = 0
    """Column of the table's outputs where `base` begins."""

    @property
    def out_features(self) -> int:
        return self.base.out_features

    def __call__(self, x: Tensor, rows: Sequence[Span] = ()) -> Tensor:
        out, length = self.base(x, rows), x.shape[-2]
        if not length:
            return out
        flat, table = x.reshape(-1, x.shape[-1]), self.table
        tiles = self.tiles.of(rows, self.rows, length, len(flat) // length)
        if len(tiles):
            target, device = out.view(-1, out.shape[-1]), (table.slices, table.ends, table.scales)
            add_slices(target, flat, tiles, *device, most=table.most, first=self.first)
        return out

    def columns(self, begin: int, end: int) -> FusedLowRank:
        return replace(self, base=self.base.columns(begin, end), first=self.first + begin)

    def take(self, rows: Sequence[int]) -> FusedLowRank:
        return replace(self, rows=tuple([self.rows[row] for row in rows]))


@dataclass(frozen=True, slots=True)
class FusedLowRankConv:
    base: nn.Conv2d
    table: UpdateTable
    rows: tuple[int | None, ...]
    """Row of the table, by pass; None: it has no update."""
    tiles: Tiles

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        return self._added(out, x, int(self.base.padding[0]))

    def valid(self, x: Tensor) -> Tensor:
        """Convolve without padding: `x` includes the border."""
        conv = self.base
        return self._added(F.conv2d(x, conv.weight, conv.bias, conv.stride), x, 0)

    def take(self, passes: slice) -> FusedLowRankConv | None:
        """Return the convolution for some of the passes; None: they have no updates."""
        rows = self.rows[passes]
        return None if all(row is None for row in rows) else replace(self, rows=rows)

    def _added(self, out: Tensor, x: Tensor, padding: int) -> Tensor:
        table, places, passes = self.table, out[0, 0].numel(), len(out)
        spans = tuple([(n * places, (n + 1) * places) for n in range(passes)])
        add_map_slices(
            out,
            x,
            self.tiles.of(spans, self.rows, passes * places, 1),
            table.slices,
            table.ends,
            table.scales,
            side=self.base.kernel_size[0],
            stride=self.base.stride[0],
            padding=padding,
            most=table.most,
        )
        return out


ByRow = LowRank | FusedLowRank
ByPass = LowRankConv | FusedLowRankConv


class RowWeights:
    """Weights of a model whose products may differ by row: a dataclass of linears
    (`map_linears`).
    """

    device: torch.device
    updates: RowUpdates | None
    """Updates of rows whose products differ (`with_adapters`); None: those of no row do."""

    def with_adapters(self, rows: Sequence[Adapters]) -> Self:
        return self._with(RowUpdates(rows, self.device)) if any(rows) else self

    def copied(self, copy: Callable[[Tensor], Tensor], moving: Sequence[MovingRows]) -> Self:
        """Return the weights with copied updates (`RowUpdates.copied`)."""
        return self if self.updates is None else self._with(self.updates.copied(copy, moving))

    def _with(self, updates: RowUpdates) -> Self:
        changed: Any = map_linears(self, updates.linear)
        return cast(Self, replace(changed, updates=updates))

    def take(self, rows: Sequence[int]) -> Self:

        def updated(place: str, linear: Linear) -> Linear:
            return linear.take(rows) if isinstance(linear, ByRow) else linear

        return self if self.updates is None else map_linears(self, updated)
