"""Low-rank updates of all packed rows as two kernels, whatever LoRAs each row has (SGMV of S-LoRA
and Punica: a table says which row reads which factors).

An update is cut into slices of up to RANKS ranks that add to the same outputs. `shrink` computes x
· Aᵀ of each slice of each row, `expand` adds Σ scale · (x · Aᵀ) · Bᵀ to the outputs. A table on the
device lists a row's slices (`batch.row_updates`); factors are read in place.

For a convolution `shrink_map` reads each position's square of the feature map in place, as an
implicit product; a pass's positions are its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskserve_engine.layers.attention import Span
from maskserve_engine.layers.kernels import addresses, operation, stand_in

RANKS = 16
"""Largest number of ranks in a slice; the smallest size that a tensor core multiplies."""
TOKENS = 32
FIELDS = 6
"""Fields of a slice: addresses of A and B, ranks, stride between outputs of B, begin and end of its
outputs."""

Slices = NDArray[np.int64]
"""[S, FIELDS] of an update; the tensors that it points to must outlive it."""


class Part(NamedTuple):
    """Update of a range of a product's outputs."""

    up: Tensor
    """B, [out, rank]."""
    begin: int
    """First output of the range."""
    rank_begin: int
    """First of its rows in the update's A."""


def slices_of(updates: Mapping[str, tuple[Tensor, Sequence[Part]]]) -> dict[str, Slices]:
    """Return the slices of a LoRA's updates, by place. `updates` has at each place A [ranks, in] of
    all parts, concatenated, and the parts, on the device.
    """
    tensors = [
        tensor for down, parts in updates.values() for tensor in (down, *(p.up for p in parts))
    ]
    found_at = iter(addresses(tensors).numpy().tolist())
    slices = {}
    for place, (down, parts) in updates.items():
        at, rows = next(found_at), []
        for up, begin, rank_begin in parts:
            at_up, ranks = next(found_at), up.shape[1]
            for first in range(0, ranks, RANKS):
                slice_down = at + (rank_begin + first) * down.stride(0) * down.element_size()
                slice_up = at_up + first * up.element_size()
                count = min(RANKS, ranks - first)
                rows.append((slice_down, slice_up, count, up.stride(0), begin, begin + len(up)))
        slices[place] = np.array(rows, np.int64).reshape(-1, FIELDS)
    return slices


def tiles_of(spans: Sequence[Span], rows: Sequence[int | None]) -> Tensor:
    """Return [T, 3] int64 on the host: up to TOKENS tokens of one row each, as number in the table
    of slices, first token and end; a row without number has none.
    """
    tiles = [
        (row, first, min(first + TOKENS, end))
        for row, (begin, end) in zip(rows, spans, strict=True)
        if row is not None
        for first in range(begin, end, TOKENS)
    ]
    return torch.tensor(tiles, dtype=torch.int64).view(-1, 3)


def padded_tiles(spans: Sequence[Span], length: int) -> Tensor:
    """Return the tiles of all rows, as many as any such number of rows in a stream of this length
    may have; unused ones have the number behind the rows' and no tokens.
    """
    rows = len(spans)
    tiles, unused = tiles_of(spans, range(rows)), torch.tensor([[rows, 0, 0]])
    return torch.cat((tiles, unused.expand(length // TOKENS + rows - len(tiles), -1)))


def add_slices(
    out: Tensor,
    x: Tensor,
    tiles: Tensor,
    slices: Tensor,
    ends: Tensor,
    scales: Tensor,
    *,
    most: int,
    first: int = 0,
) -> None:
    """Add the rows' updates of `x` to `out`, by two kernels.

    Args:
        out: [N, out], written to; the product's outputs from `first` on.
        x: [N, in].
        tiles: [T, 3] int64 (`tiles_of`).
        slices: [S, FIELDS] int64 of all rows, concatenated.
        ends: [R + 1 or more] int64: 0, then the end of each row's slices.
        scales: [S] float32.
        most: largest number of slices of a row.
        first: first output in `out`.
    """
    low = torch.ops.maskserve.shrink(x, tiles, slices, ends, first, out.shape[1], most)
    # Tokens are places of one pass, and outputs its channels.
    torch.ops.maskserve.expand(out.T[None], low, tiles, slices, ends, scales, first)


def add_map_slices(
    out: Tensor,
    x: Tensor,
    tiles: Tensor,
    slices: Tensor,
    ends: Tensor,
    scales: Tensor,
    *,
    side: int,
    stride: int,
    padding: int,
    most: int,
) -> None:
    """Add the updates of a convolution's passes.

    Args:
        out: [P, out, h, w] with contiguous positions; written to.
        x: [P, in, h, w], perhaps of another size.
        tiles: tiles of `add_slices`; pass p has the tokens from p · h · w on, row by row.
        slices: slices of `add_slices`, with A as [rank, side, side, in].
        ends: ends of `add_slices`.
        scales: scales of `add_slices`.
        side: side of the convolution's kernel.
        stride: stride of the convolution.
        padding: zeros round `x`.
        most: largest number of slices of a row.
    """
    args = side, stride, padding, most
    low = torch.ops.maskserve.shrink_map(x, tiles, slices, ends, *out.shape[2:], *args)
    places = out.view(*out.shape[:2], -1)
    torch.ops.maskserve.expand(places, low, tiles, slices, ends, scales, 0)


def compile_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Compile the kernels of `add_slices`, which the first edit with a LoRA would wait for."""
    x = torch.zeros(TOKENS, 8 * RANKS, dtype=dtype, device=device)
    # A tile without tokens, of a row without slices.
    tiles, slices, ends = (
        torch.zeros(shape, dtype=torch.int64, device=device)
        for shape in ((1, 3), (1, FIELDS), (2,))
    )
    add_slices(x.clone(), x, tiles, slices, ends, torch.zeros(1, device=device), most=1)


@operation("shrink")
def _shrink(
    x: Tensor, tiles: Tensor, slices: Tensor, ends: Tensor, first: int, outputs: int, most: int
) -> Tensor:
    from maskserve_engine.layers.shrink_expand_kernels import shrink_kernel

    low = x.new_empty(len(tiles), TOKENS, most, RANKS)
    shrink_kernel[(len(tiles), most)](
        x,
        low,
        tiles,
        slices,
        ends,
        first,
        first + outputs,
        x.stride(0),
        x.shape[1],
        most,
        tokens=TOKENS,
        ranks=RANKS,
        block=128,
        fields=FIELDS,
    )
    return low


@operation("shrink_map")
def _shrink_map(
    x: Tensor,
    tiles: Tensor,
    slices: Tensor,
    ends: Tensor,
    height: int,
    width: int,
    side: int,
    stride: int,
    padding: int,
    most: int,
) -> Tensor:
    from maskserve_engine.layers.shrink_expand_kernels import shrink_map_kernel

    low = x.new_empty(len(tiles), TOKENS, most, RANKS)
    shrink_map_kernel[(len(tiles), most)](
        x,
        low,
        tiles,
        slices,
        ends,
        *x.stride(),
        *x.shape[1:],
        height * width,
        width,
        stride,
        padding,
        most,
        tokens=TOKENS,
        ranks=RANKS,
        block=64,
        fields=FIELDS,
        side=side,
    )
    return low


@operation("expand", mutates_args=("out",))
def _expand(
    out: Tensor,
    low: Tensor,
    tiles: Tensor,
    slices: Tensor,
    ends: Tensor,
    scales: Tensor,
    first: int,
) -> None:
    from maskserve_engine.layers.shrink_expand_kernels import expand_kernel

    block, (_, outputs, places) = 128, out.shape
    of_pass, of_output, of_place = out.stride()
    expand_kernel[(len(tiles), -(-outputs // block))](
        out,
        low,
        tiles,
        slices,
        ends,
        scales,
        first,
        places,
        of_pass,
        of_place,
        of_output,
        outputs,
        low.shape[2],
        tokens=TOKENS,
        ranks=RANKS,
        block=block,
        fields=FIELDS,
    )


@stand_in("shrink")
def _(x: Tensor, tiles: Tensor, _s: Tensor, _e: Tensor, _f: int, _o: int, most: int) -> Tensor:
    return x.new_empty(tiles.shape[0], TOKENS, most, RANKS)


@stand_in("shrink_map")
def _(x: Tensor, tiles: Tensor, _s: Tensor, _e: Tensor, *args: int) -> Tensor:
    return x.new_empty(tiles.shape[0], TOKENS, args[-1], RANKS)


@stand_in("expand")
def _(*_: object) -> None:
    return None
