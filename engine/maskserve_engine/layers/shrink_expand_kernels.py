"""The kernels of `shrink_expand`, in the Triton language (the package `triton`; not the server).

One program handles up to `tokens` tokens of one row, so a row's results do not depend on its batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

TABLES = ("tiles", "slices", "ends", "scales")
"""Tables that are read number by number, wherever they lie."""


# One compiled kernel serves LoRAs of any rank.
@triton.jit(do_not_specialize=("most",), do_not_specialize_on_alignment=TABLES)
def shrink_kernel(
    x,
    low,
    tiles,
    slices,
    ends,
    first,
    last,
    x_stride,
    inner,
    most,
    tokens: tl.constexpr,
    ranks: tl.constexpr,
    block: tl.constexpr,
    fields: tl.constexpr,
):
    """Grid: (tiles, most slices of a row). `low` [tiles, tokens, most, ranks] is x · Aᵀ; slices
    that add to no output from `first` to `last` are skipped.
    """
    tile, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(tiles + tile * 3)
    begin = tl.load(tiles + tile * 3 + 1)
    end = tl.load(tiles + tile * 3 + 2)
    at = tl.load(ends + row) + number
    if at < tl.load(ends + row + 1):
        slice_at = slices + at * fields
        if (tl.load(slice_at + 5) > first) & (tl.load(slice_at + 4) < last):
            down = tl.cast(tl.load(slice_at), x.dtype)
            rank, token = tl.arange(0, ranks), begin + tl.arange(0, tokens)
            in_tile = token < end
            in_rank = rank < tl.load(slice_at + 2)
            low_sums = tl.zeros((tokens, ranks), tl.float32)
            for k in range(0, inner, block):
                column = k + tl.arange(0, block)
                inside = column < inner
                x_tile = tl.load(
                    x + token[:, None] * x_stride + column[None, :],
                    mask=in_tile[:, None] & inside[None, :],
                    other=0.0,
                )
                down_tile = tl.load(
                    down + column[:, None] + rank[None, :] * inner,
                    mask=inside[:, None] & in_rank[None, :],
                    other=0.0,
                )
                low_sums += tl.dot(x_tile, down_tile, input_precision="ieee")
            to = low + ((tile * tokens + tl.arange(0, tokens)) * most + number)[:, None] * ranks
            tl.store(to + rank[None, :], low_sums.to(low.dtype.element_ty))


MAP_SIZES = ("row_stride", "height", "width", "places", "out_width", "stride", "padding", "most")


# And one maps of any size, by convolutions of any stride.
@triton.jit(do_not_specialize=MAP_SIZES, do_not_specialize_on_alignment=(*TABLES, "channel_stride"))
def shrink_map_kernel(
    x,
    low,
    tiles,
    slices,
    ends,
    pass_stride,
    channel_stride,
    row_stride,
    column_stride,
    channels,
    height,
    width,
    places,
    out_width,
    stride,
    padding,
    most,
    tokens: tl.constexpr,
    ranks: tl.constexpr,
    block: tl.constexpr,
    fields: tl.constexpr,
    side: tl.constexpr,
):
    """`shrink_kernel` for convolutions: each result position reads a square of the map, and A is
    [rank, side, side, channels]. `places` is the number of result positions of a pass; grid and
    `low` are the same.
    """
    tile, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(tiles + tile * 3)
    begin = tl.load(tiles + tile * 3 + 1)
    end = tl.load(tiles + tile * 3 + 2)
    at = tl.load(ends + row) + number
    if at < tl.load(ends + row + 1):
        slice_at = slices + at * fields
        down = tl.cast(tl.load(slice_at), x.dtype)
        rank, token = tl.arange(0, ranks), begin + tl.arange(0, tokens)
        in_tile = token < end
        in_rank = rank < tl.load(slice_at + 2)
        of_pass = begin // places
        place = token - of_pass * places
        top = place // out_width * stride - padding
        left = place % out_width * stride - padding
        low_sums = tl.zeros((tokens, ranks), tl.float32)
        for tap in range(side * side):
            y, z = top + tap // side, left + tap % side
            in_map = in_tile & (y >= 0) & (y < height) & (z >= 0) & (z < width)
            x_at = x + of_pass * pass_stride + y * row_stride + z * column_stride
            down_at = down + rank * (side * side * channels) + tap * channels
            for k in range(0, channels, block):
                channel = k + tl.arange(0, block)
                inside = channel < channels
                x_tile = tl.load(
                    x_at[:, None] + channel[None, :] * channel_stride,
                    mask=in_map[:, None] & inside[None, :],
                    other=0.0,
                )
                down_tile = tl.load(
                    down_at[None, :] + channel[:, None],
                    mask=inside[:, None] & in_rank[None, :],
                    other=0.0,
                )
                low_sums += tl.dot(x_tile, down_tile, input_precision="ieee")
        to = low + ((tile * tokens + tl.arange(0, tokens)) * most + number)[:, None] * ranks
        tl.store(to + rank[None, :], low_sums.to(low.dtype.element_ty))


@triton.jit(
    do_not_specialize=("places", "most"),
    do_not_specialize_on_alignment=(*TABLES, "output_stride"),
)
def expand_kernel(
    out,
    low,
    tiles,
    slices,
    ends,
    scales,
    first,
    places,
    pass_stride,
    place_stride,
    output_stride,
    outputs,
    most,
    tokens: tl.constexpr,
    ranks: tl.constexpr,
    block: tl.constexpr,
    fields: tl.constexpr,
):
    """Grid: (tiles, blocks of outputs). Adds all slices of a row to its outputs, summed in float32;
    outputs of a row without slices are not touched. `out` begins at output `first` of the product.
    A pass has `places` tokens; a tile belongs to one pass.
    """
    tile, least = tl.program_id(0).to(tl.int64), tl.program_id(1) * block
    row = tl.load(tiles + tile * 3)
    begin = tl.load(tiles + tile * 3 + 1)
    end = tl.load(tiles + tile * 3 + 2)
    rank, number = tl.arange(0, ranks), tl.arange(0, tokens)
    column = least + tl.arange(0, block)
    lows = low + (tile * tokens + number)[:, None] * most * ranks + rank[None, :]
    most_column = tl.minimum(least + block, outputs)  # what is beyond has not been shrunk
    begin_slice, end_slice = tl.load(ends + row), tl.load(ends + row + 1)
    if begin_slice < end_slice:
        added = tl.zeros((tokens, block), tl.float32)
        for at in range(begin_slice, end_slice):
            slice_at = slices + at * fields
            lowest, highest = tl.load(slice_at + 4) - first, tl.load(slice_at + 5) - first
            if (highest > least) & (lowest < most_column):
                up = tl.cast(tl.load(slice_at + 1), out.dtype)
                inside = (column >= lowest) & (column < highest)
                in_rank = rank < tl.load(slice_at + 2)
                low_tile = tl.load(lows + (at - begin_slice) * ranks)
                up_tile = tl.load(
                    up + (column - lowest)[None, :] * tl.load(slice_at + 3) + rank[:, None],
                    mask=inside[None, :] & in_rank[:, None],
                    other=0.0,
                )
                added += tl.load(scales + at) * tl.dot(low_tile, up_tile, input_precision="ieee")
        token, of_pass = begin + number, begin // places
        from_pass = out + of_pass * pass_stride + (token - of_pass * places) * place_stride
        to = from_pass[:, None] + column[None, :] * output_stride
        in_out = (token < end)[:, None] & (column < outputs)[None, :]
        tl.store(to, tl.load(to, mask=in_out, other=0.0).to(tl.float32) + added, mask=in_out)
