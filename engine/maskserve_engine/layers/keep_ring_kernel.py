"""The kernel of `keep_ring`, in the Triton language (the package `triton`; not the server).

One program handles one group of channels of a feature map.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sum(
    x,
    box,
    mean,
    places,
    columns,
    power: tl.constexpr,
    channels: tl.constexpr,
    positions: tl.constexpr,
    block: tl.constexpr,
):
    """Sum a group's deviations from `mean` outside the box, or their squares if `power` is 2."""
    channel = tl.arange(0, block)
    sums = tl.zeros((block, positions), tl.float32)
    for begin in range(0, places, positions):
        place = begin + tl.arange(0, positions)
        row, column = place // columns, place % columns
        in_box = (row >= box[0]) & (row < box[1]) & (column >= box[2]) & (column < box[3])
        outside = (place < places) & (in_box == 0)
        counted = (channel < channels)[:, None] & outside[None, :]
        number = tl.load(x + channel[:, None] * places + place[None, :], mask=counted, other=0.0)
        deviation = tl.where(counted, number.to(tl.float32) - mean, 0.0)
        sums += deviation if power == 1 else deviation * deviation
    return tl.sum(tl.sum(sums, 1), 0)


INTEGERS = ("in_ring", "places", "columns", "region_top", "region_left", "region_columns",
             "top", "bottom", "left", "right")  # fmt: skip


# One compiled kernel serves all tiles, wherever their rings lie.
@triton.jit(do_not_specialize=("at_ring", "ring", "means", "variances", *INTEGERS))
def keep_ring_kernel(
    x,
    at_ring,
    ring,
    means,
    variances,
    in_ring,
    places,
    columns,
    region_top,
    region_left,
    region_columns,
    top,
    bottom,
    left,
    right,
    channels: tl.constexpr,
    positions: tl.constexpr,
    block: tl.constexpr,
    norms: tl.constexpr,
):
    """Grid: (groups of `channels`). `x`: [C, places] of a map of so many `columns`. `at_ring`:
    [in_ring] positions of the ring in a region of the map, which begins at `region_top` and
    `region_left` and has `region_columns`. `top` to `right`: the box. `norms`: whether moments are
    written. `positions` and `block`: positions and channels that a program handles at once.
    """
    group = tl.program_id(0)
    channel = tl.arange(0, block)
    in_group = channel < channels
    of_group = x + group.to(tl.int64) * channels * places
    to_ring = ring + group.to(tl.int64) * channels * in_ring
    for begin in range(0, in_ring, positions):
        number = begin + tl.arange(0, positions)
        inside = number < in_ring
        in_region = tl.load(at_ring + number, mask=inside, other=0)
        row, column = in_region // region_columns, in_region % region_columns
        place = (region_top + row) * columns + region_left + column
        mask = in_group[:, None] & inside[None, :]
        read = tl.load(of_group + channel[:, None] * places + place[None, :], mask=mask, other=0.0)
        tl.store(to_ring + channel[:, None] * in_ring + number[None, :], read, mask=mask)
    if norms:
        box = (top, bottom, left, right)
        count = ((places - (bottom - top) * (right - left)) * channels).to(tl.float32)
        mean = _sum(of_group, box, 0.0, places, columns, 1, channels, positions, block) / count
        squares = _sum(of_group, box, mean, places, columns, 2, channels, positions, block)
        tl.store(means + group, mean)
        tl.store(variances + group, squares / count)
