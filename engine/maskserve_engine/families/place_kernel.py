"""The kernel of `place`, in the Triton language (the package `triton`; not the server).

One program writes one token's keys or values. Which row it belongs to is known on the device; where
that row's tensors lie comes with the launch, so nothing has to be copied there for a block.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place_kernel(
    keys,
    values,
    row_of,
    local,
    to,
    ids,
    data_k,
    data_v,
    scale_k,
    scale_v,
    groups_k,
    groups_v,
    width: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
    kind: tl.constexpr,
    group: tl.constexpr,
):
    """Grid: (inactive tokens of all rows, 2). `ids` to `groups_v` are addresses, one per row."""
    token = tl.program_id(0)
    second = tl.program_id(1) == 1
    row = tl.load(row_of + token)
    at_ids = ids[0]
    data = tl.where(second, data_v[0], data_k[0])
    scales = tl.where(second, scale_v[0], scale_k[0])
    groups = tl.where(second, groups_v[0], groups_k[0])
    for i in tl.static_range(1, rows):
        mine = row == i
        at_ids = tl.where(mine, ids[i], at_ids)
        data = tl.where(mine, tl.where(second, data_v[i], data_k[i]), data)
        scales = tl.where(mine, tl.where(second, scale_v[i], scale_k[i]), scales)
        groups = tl.where(mine, tl.where(second, groups_v[i], groups_k[i]), groups)
    source = tl.load(tl.cast(at_ids, tl.pointer_type(tl.int64)) + tl.load(local + token))
    out = tl.where(second, tl.cast(values, tl.int64), tl.cast(keys, tl.int64))
    out = tl.cast(out, keys.dtype) + tl.load(to + token) * width
    dtype = keys.dtype.element_ty

    at = tl.arange(0, block)
    inside = at < width
    if kind == "model":
        x = tl.load(tl.cast(data, keys.dtype) + source * width + at, mask=inside)
    else:
        scale = tl.load(tl.cast(scales, tl.pointer_type(tl.float32)) + at, mask=inside)
        scale = scale.to(dtype).to(tl.float32)
        if kind == "int4":
            pairs = tl.cast(data, tl.pointer_type(tl.uint8)) + source * (width // 2)
            pair = tl.load(pairs + at // 2, mask=inside, other=0)
            steps = ((pair >> ((at % 2) * 4)) & 0xF).to(tl.float32) - 8.0
            own = tl.cast(groups, tl.pointer_type(tl.float16)) + source * (width // group)
            each = tl.load(own + at // group, mask=inside, other=0.0).to(dtype).to(tl.float32)
            wide = (steps * each).to(dtype).to(tl.float32)
        elif kind == "int8":
            stored = tl.cast(data, tl.pointer_type(tl.int8)) + source * width
            wide = tl.load(stored + at, mask=inside, other=0).to(tl.float32)
        else:
            stored = tl.cast(data, tl.pointer_type(tl.float8e4nv)) + source * width
            wide = tl.load(stored + at, mask=inside, other=0.0).to(tl.float32)
        x = (wide * scale).to(dtype)
    tl.store(out + at, x, mask=inside)
