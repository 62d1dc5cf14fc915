"""LoRA updates of packed rows: by kernels on CUDA, as grouped products elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskserve_engine.batch.transfer import to_device
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
from maskserve_engine.layers.shrink_expand import FIELDS, TOKENS, add_map_slices, add_slices


class RowUpdates:
    def __init__(self, rows: Sequence[Adapters], device: torch.device) -> None:
        self._rows, self._tiles = rows, Tiles(device)
        self._tables = tables(rows, device) if has_kernels(device) else None

    def linear(self, place: str, base: Linear) -> Linear:
        """Return the product at a place of the weights, with the rows' updates added."""
        if self._tables is None:
            return low_rank(place, base, self._rows)
        table = self._tables.get(place)
        if table is None:
            return base
        return FusedLowRank(base, table, tuple(range(len(self._rows))), self._tiles)

    def conv(self, place: str, base: nn.Conv2d) -> LowRankConv | FusedLowRankConv | None:
        """Return the convolution at a place, with the passes' updates added; None: no pass
        has any.
        """
        if self._tables is None:
            return low_rank_conv(place, base, self._rows)
        table = self._tables.get(place)
        if table is None:
            return None
        return FusedLowRankConv(base, table, tuple(range(len(self._rows))), self._tiles)


class UpdateTable(NamedTuple):
    slices: Tensor
    """[S, FIELDS] int64 slices of all rows, concatenated."""
    scales: Tensor
    ends: Tensor
    """[R + 1] int64: 0, then the end of each row's slices."""
    counts: tuple[int, ...]


def tables(rows: Sequence[Adapters], device: torch.device) -> dict[str, UpdateTable]:
    """Return the updates by place, moved to the device in one transfer."""
    places = {place for row in rows for updates, _ in row for place in updates.slices}
    nothing = np.empty((0, FIELDS), np.int64), np.empty(0, np.float32)
    host: list[Tensor] = []
    counts: dict[str, tuple[int, ...]] = {}
    for place in sorted(places):
        slices, scales, lengths = [nothing[0]], [nothing[1]], []
        for row in rows:
            updates = [
                (update.slices[place], scale) for update, scale in row if place in update.slices
            ]
            slices += [update for update, _ in updates]
            scales += [np.full(len(update), scale, np.float32) for update, scale in updates]
            lengths.append(sum(len(update) for update, _ in updates))
        ends = np.cumsum([0, *lengths])
        host += map(torch.from_numpy, (np.concatenate(slices), np.concatenate(scales), ends))
        counts[place] = tuple(lengths)
    device_tensors = iter(to_device(host, device))
    return {
        place: UpdateTable(
            next(device_tensors), next(device_tensors), next(device_tensors), updates
        )
        for place, updates in counts.items()
    }


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tokens of each program: [T, 3] row of the table, first token, end. Kept with a batch, so that
    a steady step transfers none.
    """

    device: torch.device
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
        key = tuple(spans), tuple(rows), length, copies
        tile_table = self._known.get(key)
        if tile_table is None:
            tiles = [
                (row, shift + first, shift + min(first + TOKENS, end))
                for shift in range(0, copies * length, length)
                for row, (begin, end) in zip(rows, spans, strict=True)
                if row is not None
                for first in range(begin, end, TOKENS)
            ]
            host = torch.tensor(tiles, dtype=torch.int64).view(-1, 3)
            [tile_table] = to_device([host], self.device)
            self._known[key] = tile_table
        return tile_table


@dataclass(frozen=True, slots=True)
class FusedLowRank:
    """`LowRank` as two kernels for all rows."""

    base: Linear
    table: UpdateTable
    rows: tuple[int, ...]
    """Row of the table, by packed row."""
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
        table_rows = [row if table.counts[row] else None for row in self.rows]
        tiles = self.tiles.of(rows, table_rows, length, len(flat) // length)
        if len(tiles):
            target, most = out.view(-1, out.shape[-1]), max(table.counts)
            device = table.slices, table.ends, table.scales
            add_slices(target, flat, tiles, *device, most=most, first=self.first)
        return out

    def columns(self, begin: int, end: int) -> FusedLowRank:
        return replace(self, base=self.base.columns(begin, end), first=self.first + begin)

    def take(self, rows: Sequence[int]) -> FusedLowRank:
        return replace(self, rows=tuple([self.rows[row] for row in rows]))


@dataclass(frozen=True, slots=True)
class FusedLowRankConv:
    base: nn.Conv2d
    table: UpdateTable
    rows: tuple[int, ...]
    """Row of the table, by pass."""
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
        return replace(self, rows=rows) if any(self.table.counts[row] for row in rows) else None

    def _added(self, out: Tensor, x: Tensor, padding: int) -> Tensor:
        table, places, passes = self.table, out[0, 0].numel(), len(out)
        spans = tuple([(n * places, (n + 1) * places) for n in range(passes)])
        table_rows = [row if table.counts[row] else None for row in self.rows]
        add_map_slices(
            out,
            x,
            self.tiles.of(spans, table_rows, passes * places, 1),
            table.slices,
            table.ends,
            table.scales,
            side=self.base.kernel_size[0],
            stride=self.base.stride[0],
            padding=padding,
            most=max(table.counts),
        )
        return out


ByRow = LowRank | FusedLowRank
ByPass = LowRankConv | FusedLowRankConv


class RowWeights:
    """Weights of a model whose products may differ by row: a dataclass of linears
    (`map_linears`).
    """

    device: torch.device
    by_row: bool
    """Whether some products differ by row (`with_adapters`)."""

    def with_adapters(self, rows: Sequence[Adapters]) -> Self:
        if not any(rows):
            return self
        changed: Any = map_linears(self, RowUpdates(rows, self.device).linear)
        return cast(Self, replace(changed, by_row=True, graphs=None))

    def take(self, rows: Sequence[int]) -> Self:

        def updated(place: str, linear: Linear) -> Linear:
            return linear.take(rows) if isinstance(linear, ByRow) else linear

        return map_linears(self, updated) if self.by_row else self
