"""The kernel of `read_rings`, in the Triton language (the package `triton`; not the server).

One program handles one group of channels of one half of one feature map. A table on the device
gives the maps' addresses, so all maps of an entry take one launch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _values(
    data,
    scales,
    groups,
    ids,
    begin,
    of_region,
    inside,
    channels,
    in_width,
    width,
    dtype: tl.constexpr,
    kind: tl.constexpr,
    group: tl.constexpr,
):
    """Load [positions, channels] of a map, decoded and rounded as in the plain path.

    `data` to `ids` are addresses; `ids` is 0 if exactly the region's tokens are stored.
    """
    token = begin + of_region
    if ids != 0:
        token = tl.load(tl.cast(ids, tl.pointer_type(tl.int64)) + token, mask=inside, other=0)
    mask = inside[:, None] & in_width[None, :]
    at = token[:, None] * width + channels[None, :]
    if kind == "model":
        x = tl.load(tl.cast(data, tl.pointer_type(dtype)) + at, mask=mask, other=0.0)
    else:
        at_scale = tl.cast(scales, tl.pointer_type(tl.float32)) + channels
        scale = tl.load(at_scale, mask=in_width, other=0.0).to(dtype).to(tl.float32)
        if kind == "int4":
            pair = tl.load(tl.cast(data, tl.pointer_type(tl.uint8)) + at // 2, mask=mask, other=0)
            upper = (channels % 2 == 1)[None, :]
            steps = tl.where(upper, pair >> 4, pair & 0xF).to(tl.float32) - 8.0
            group_at = token[:, None] * (width // group) + channels[None, :] // group
            group_scale = tl.load(
                tl.cast(groups, tl.pointer_type(tl.float16)) + group_at, mask=mask, other=0.0
            )
            wide = (steps * group_scale.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        elif kind == "int8":
            stored = tl.cast(data, tl.pointer_type(tl.int8)) + at
            wide = tl.load(stored, mask=mask, other=0).to(tl.float32)
        else:
            stored = tl.cast(data, tl.pointer_type(tl.float8e4nv)) + at
            wide = tl.load(stored, mask=mask, other=0.0).to(tl.float32)
        x = (wide * scale[None, :]).to(dtype)
    return x


@triton.jit
def _sum(
    map_fields,
    at_box,
    box_positions,
    first,
    channels,
    width,
    mean,
    power: tl.constexpr,
    positions: tl.constexpr,
    block: tl.constexpr,
    dtype: tl.constexpr,
    kind: tl.constexpr,
    group: tl.constexpr,
):
    """Sum a group's deviations from `mean` in the box, or their squares if `power` is 2;
    `map_fields` are the first arguments of `_values`.
    """
    sums = tl.zeros((positions, block), tl.float32)
    for at in range(0, box_positions, positions):
        number = at + tl.arange(0, positions)
        inside = number < box_positions
        of_region = tl.load(at_box + number, mask=inside, other=0)
        for beyond in range(0, channels, block):
            channel = beyond + tl.arange(0, block)
            in_group = channel < channels
            x = _values(map_fields[0], map_fields[1], map_fields[2], map_fields[3], map_fields[4],
                        of_region, inside, first + channel, in_group, width, dtype, kind,
                        group)  # fmt: skip
            deviation = tl.where(inside[:, None] & in_group[None, :], x.to(tl.float32) - mean, 0.0)
            sums += deviation if power == 1 else deviation * deviation
    return tl.sum(tl.sum(sums, 1), 0)


@triton.jit
def read_rings_kernel(
    rings,
    moments,
    totals,
    table,
    halves,
    fields: tl.constexpr,
    norm_groups: tl.constexpr,
    positions: tl.constexpr,
    block: tl.constexpr,
    kind: tl.constexpr,
    group: tl.constexpr,
):
    """Grid: (maps, halves, groups of the norms). `table` has the fields of `read_rings.FIELDS` for
    each map. `positions` and `block`: positions and channels that a program handles at once.
    """
    half, norm_group = tl.program_id(1), tl.program_id(2)
    row = table + tl.program_id(0) * fields
    data, scales, groups, ids = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    at_ring = tl.cast(tl.load(row + 4), tl.pointer_type(tl.int64))
    at_box = tl.cast(tl.load(row + 5), tl.pointer_type(tl.int64))
    region, in_ring, box_positions, width = (
        tl.load(row + 6), tl.load(row + 7), tl.load(row + 8), tl.load(row + 9),
    )  # fmt: skip
    to_ring, to_moments, number_of_map, whole = (
        tl.load(row + 10), tl.load(row + 11), tl.load(row + 12), tl.load(row + 13),
    )  # fmt: skip
    dtype: tl.constexpr = rings.dtype.element_ty
    group_channels = width // norm_groups
    first = norm_group * group_channels
    begin = half * region

    for at in range(0, in_ring, positions):
        number = at + tl.arange(0, positions)
        inside = number < in_ring
        of_region = tl.load(at_ring + number, mask=inside, other=0)
        for beyond in range(0, group_channels, block):
            channel = beyond + tl.arange(0, block)
            in_group = channel < group_channels
            channels = first + channel
            x = _values(data, scales, groups, ids, begin, of_region, inside, channels, in_group,
                        width, dtype, kind, group)  # fmt: skip
            out = rings + to_ring + (half * width + channels)[None, :] * in_ring + number[:, None]
            tl.store(out, x, mask=inside[:, None] & in_group[None, :])

    if box_positions > 0:
        count = (box_positions * group_channels).to(tl.float32)
        map_fields = (data, scales, groups, ids, begin)
        mean = (
            _sum(
                map_fields,
                at_box,
                box_positions,
                first,
                group_channels,
                width,
                0.0,
                1,
                positions,
                block,
                dtype,
                kind,
                group,
            )
            / count
        )
        variance = (
            _sum(
                map_fields,
                at_box,
                box_positions,
                first,
                group_channels,
                width,
                mean,
                2,
                positions,
                block,
                dtype,
                kind,
                group,
            )
            / count
        )

        # What `Moments.__sub__` does.
        total = totals + (number_of_map * halves + half) * 2 * norm_groups + norm_group
        all_mean, all_variance = tl.load(total), tl.load(total + norm_groups)
        share = box_positions.to(tl.float32) / whole.to(tl.float32)
        outside_share = 1.0 - share
        outside = (all_mean - share * mean) / outside_share
        mean_change = mean - outside
        outside_variance = (
            all_variance - share * variance - share * outside_share * mean_change * mean_change
        ) / outside_share
        to = moments + to_moments + half * norm_groups + norm_group
        tl.store(to, outside)
        tl.store(to + halves * norm_groups, tl.maximum(outside_variance, 0.0))
