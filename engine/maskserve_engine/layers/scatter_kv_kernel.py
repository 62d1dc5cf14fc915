"""The kernel of `scatter_kv`, in the Triton language (the package `triton`; not the server).

One program writes one token into one buffer: its keys, values or hidden states. Which row it
belongs to is known on the device; where that row's tensors lie comes with the launch, so nothing
has to be copied there for a block.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _pointer(address, dtype: tl.constexpr, aligned: tl.constexpr):
    """Where that address is; an address that was chosen among several is not known to be a multiple
    of anything.
    """
    at = tl.cast(address, dtype)
    if aligned:
        at = tl.multiple_of(at, 16)
    return at


@triton.jit
def scatter_kv_kernel(
    first,
    other,
    row_of,
    local,
    to,
    ids,
    data_a,
    data_b,
    scale_a,
    scale_b,
    groups_a,
    groups_b,
    weights,
    step: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
    kind: tl.constexpr,
    group: tl.constexpr,
    aligned: tl.constexpr,
    adds: tl.constexpr,
):
    """Grid: (inactive tokens of all rows, buffers: 1 or 2). `ids` to `groups_b` are addresses, one
    per row and some more, of which no token speaks; a row whose data has address 0 is left as it
    is. `step`: from token to token in the buffers. `aligned`: all addresses and steps are multiples
    of 16 bytes, so that threads may read and write as many at once. `adds`: what is read is added,
    times its row's of `weights`, to what lies there.
    """
    token = tl.program_id(0)
    second = tl.program_id(1) == 1
    row = tl.load(row_of + token)
    at_ids = ids[0]
    data = tl.where(second, data_b[0], data_a[0])
    scales = tl.where(second, scale_b[0], scale_a[0])
    groups = tl.where(second, groups_b[0], groups_a[0])
    weight = tl.cast(weights[0], tl.float32)
    for i in tl.static_range(1, rows):
        mine = row == i
        at_ids = tl.where(mine, ids[i], at_ids)
        data = tl.where(mine, tl.where(second, data_b[i], data_a[i]), data)
        scales = tl.where(mine, tl.where(second, scale_b[i], scale_a[i]), scales)
        groups = tl.where(mine, tl.where(second, groups_b[i], groups_a[i]), groups)
        weight = tl.where(mine, tl.cast(weights[i], tl.float32), weight)
    out = tl.where(second, tl.cast(other, tl.int64), tl.cast(first, tl.int64))
    source = tl.load(tl.cast(at_ids, tl.pointer_type(tl.int64)) + tl.load(local + token))
    out = _pointer(out, first.dtype, aligned) + tl.load(to + token) * step
    dtype = first.dtype.element_ty

    at = tl.arange(0, block)
    here = tl.where(data == 0, 0, width)  # of the token's numbers, those that are read
    inside = at < here
    if kind == "model":
        x = tl.load(_pointer(data, first.dtype, aligned) + source * width + at, mask=inside)
    else:
        scale = tl.load(_pointer(scales, tl.pointer_type(tl.float32), aligned) + at, mask=inside)
        scale = scale.to(dtype).to(tl.float32)
        if kind == "int4":
            # A byte has two numbers, the lower half first.
            half = tl.arange(0, block // 2)
            pairs = _pointer(data, tl.pointer_type(tl.uint8), aligned) + source * (width // 2)
            pair = tl.load(pairs + half, mask=half < here // 2, other=0)
            steps = tl.interleave(pair & 0xF, pair >> 4).to(tl.float32) - 8.0
            own = _pointer(groups, tl.pointer_type(tl.float16), aligned) + source * (width // group)
            each = tl.load(own + at // group, mask=inside, other=0.0).to(dtype).to(tl.float32)
            wide = (steps * each).to(dtype).to(tl.float32)
        elif kind == "int8":
            stored = _pointer(data, tl.pointer_type(tl.int8), aligned) + source * width
            wide = tl.load(stored + at, mask=inside, other=0).to(tl.float32)
        else:
            stored = _pointer(data, tl.pointer_type(tl.float8e4nv), aligned) + source * width
            wide = tl.load(stored + at, mask=inside, other=0.0).to(tl.float32)
        x = (wide * scale).to(dtype)
    if adds:
        before = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
        x = (before + weight * x.to(tl.float32)).to(dtype)
    tl.store(out + at, x, mask=inside)
