"""The kernel of `scatter_kv`, in the Triton language (the package `triton`; not the server).

One program writes some tokens, or a part of their numbers, to one buffer of keys, values or hidden
states, with all added terms. The row of a token is known on the device; addresses of that row's
tensors are launch arguments, so no table has to be copied for a block.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _pointer(address, dtype: tl.constexpr, aligned: tl.constexpr):
    """Cast an address to a pointer. The compiler cannot derive the alignment of an address selected
    from several, so `aligned` states it.
    """
    at = tl.cast(address, dtype)
    if aligned:
        at = tl.multiple_of(at, 16)
    return at


@triton.jit
def _of(numbers, row, term: tl.constexpr, rows: tl.constexpr):
    value = numbers[term * rows]
    for i in tl.static_range(1, rows):
        value = tl.where(row == i, numbers[term * rows + i], value)
    return value


@triton.jit
def _decoded(
    data,
    scales,
    groups,
    source,
    in_row,
    end,
    begin,
    like,
    width: tl.constexpr,
    block: tl.constexpr,
    kind: tl.constexpr,
    group: tl.constexpr,
    aligned: tl.constexpr,
):
    """Load [tokens, block] numbers of stored tokens, from number `begin` of each up to `end`,
    rounded as `like`; 0 for tokens that are not `in_row`.
    """
    dtype: tl.constexpr = like.dtype.element_ty
    at = begin + tl.arange(0, block)
    inside = in_row[:, None] & (at < end)[None, :]
    if kind == "model":
        stored_at = _pointer(data, like.dtype, aligned) + (source * width)[:, None]
        x = tl.load(stored_at + at[None, :], mask=inside, other=0.0)
    else:
        scale = tl.load(_pointer(scales, tl.pointer_type(tl.float32), aligned) + at, at < end, 0.0)
        scale = scale.to(dtype).to(tl.float32)
        if kind == "int4":
            # A byte has two numbers, the lower half first.
            half = begin // 2 + tl.arange(0, block // 2)
            pairs = _pointer(data, tl.pointer_type(tl.uint8), aligned)
            pairs = pairs + (source * (width // 2))[:, None] + half[None, :]
            pair = tl.load(pairs, mask=in_row[:, None] & (half < end // 2)[None, :], other=0)
            steps = tl.interleave(pair & 0xF, pair >> 4).to(tl.float32) - 8.0
            stored_at = _pointer(groups, tl.pointer_type(tl.float16), aligned)
            stored_at = stored_at + (source * (width // group))[:, None] + (at // group)[None, :]
            group_scale = tl.load(stored_at, mask=inside, other=0.0).to(dtype).to(tl.float32)
            wide = (steps * group_scale).to(dtype).to(tl.float32)
        elif kind == "int8":
            stored = _pointer(data, tl.pointer_type(tl.int8), aligned) + (source * width)[:, None]
            wide = tl.load(stored + at[None, :], mask=inside, other=0).to(tl.float32)
        else:
            stored = _pointer(data, tl.pointer_type(tl.float8e4nv), aligned)
            stored = stored + (source * width)[:, None]
            wide = tl.load(stored + at[None, :], mask=inside, other=0.0).to(tl.float32)
        x = (wide * scale[None, :]).to(dtype)
    return x.to(tl.float32)


@triton.jit(do_not_specialize=("count",))
def scatter_kv_kernel(
    first,
    other,
    count,
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
    tokens: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
    terms: tl.constexpr,
    kind: tl.constexpr,
    group: tl.constexpr,
    aligned: tl.constexpr,
    adds: tl.constexpr,
):
    """Grid: (cached tokens of all rows, `count`, by `tokens`; numbers of a token, `width`, by
    `block`; buffers: 1 or 2). A token is the weighted sum of its row's terms. `ids` to `weights`
    have `rows` numbers per term, padded beyond the actual rows; a term of weight 0 is absent, and a
    row without terms is not changed. `step`: stride between tokens in the buffers. `aligned`: all
    addresses and strides are multiples of 16 bytes, which a thread may access at once. `adds`: the
    sum is added to the buffer; otherwise the first term's weight is 1.
    """
    begin = tl.program_id(0) * tokens
    first_number = tl.program_id(1) * block
    second = tl.program_id(2) == 1
    out = tl.where(second, tl.cast(other, tl.int64), tl.cast(first, tl.int64))
    at = first_number + tl.arange(0, block)
    token = begin + tl.arange(0, tokens)
    in_range = token < count
    row_of_token = tl.load(row_of + token, mask=in_range, other=-1)
    number = tl.load(local + token, mask=in_range, other=0)
    place = _pointer(out, first.dtype, aligned)
    place = place + (tl.load(to + token, mask=in_range, other=0) * step)[:, None] + at[None, :]

    # Of one row, but where another begins.
    last = tl.minimum(begin + tokens, count) - 1
    for row in range(tl.load(row_of + begin), tl.load(row_of + last) + 1):
        in_row = row_of_token == row
        weight_sum = 0.0
        for n in tl.static_range(terms):
            weight_sum += tl.abs(tl.cast(_of(weights, row, n, rows), tl.float32))
        written = in_row[:, None] & (at < tl.where(weight_sum == 0.0, 0, width))[None, :]
        total = tl.zeros((tokens, block), tl.float32)
        if adds:
            total = tl.load(place, mask=written, other=0.0).to(tl.float32)
        for n in tl.static_range(terms):
            data = tl.where(second, _of(data_b, row, n, rows), _of(data_a, row, n, rows))
            scales = tl.where(second, _of(scale_b, row, n, rows), _of(scale_a, row, n, rows))
            groups = tl.where(second, _of(groups_b, row, n, rows), _of(groups_a, row, n, rows))
            weight = tl.cast(_of(weights, row, n, rows), tl.float32)
            read_width = tl.where(
                weight == 0.0, 0, width
            )  # of a token's numbers, those that are read
            row_ids = tl.cast(_of(ids, row, n, rows), tl.pointer_type(tl.int64))
            source = tl.load(row_ids + number, mask=in_row, other=0)
            x = _decoded(
                data, scales, groups, source, in_row, read_width, first_number, first,
                width, block, kind, group, aligned,
            )  # fmt: skip
            if n == 0 and not adds:
                total = x
            else:
                total += weight * x
        tl.store(place, total.to(first.dtype.element_ty), mask=written)
