"""The kernel of `keep_tokens`, in the Triton language (the package `triton`; not the server).

One program encodes some channels of all kept tokens of one tensor: it looks for the largest
numbers, then reads the tokens once more and writes them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _decoded(data, scales, at, channels, inside, in_width, like):
    """Load int8 numbers as float32, rounded as `like`."""
    dtype: tl.constexpr = like.dtype.element_ty
    scale = tl.load(scales + channels, mask=in_width, other=0.0).to(dtype).to(tl.float32)
    stored = tl.load(data + at, mask=inside, other=0).to(tl.float32)
    return (stored * scale[None, :]).to(dtype).to(tl.float32)


@triton.jit
def _terms(
    x,
    ids,
    begin,
    count,
    channels,
    in_width,
    last,
    last_scales,
    slopes,
    slopes_scales,
    stride,
    reach,
    width: tl.constexpr,
    tokens: tl.constexpr,
    terms: tl.constexpr,
):
    """Return [tokens, channels] of the terms that are kept, float32; those beyond `terms` are
    arbitrary.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    number = begin + tl.arange(0, tokens)
    in_range = number < count
    inside = in_range[:, None] & in_width[None, :]
    token = tl.load(ids + number, mask=in_range, other=0)
    at = number.to(tl.int64)[:, None] * width + channels[None, :]
    new = tl.load(x + token[:, None] * stride + channels[None, :], mask=inside, other=0.0)
    new = new.to(tl.float32)
    change = new
    bend = new
    if terms > 1:
        change = new - _decoded(last, last_scales, at, channels, inside, in_width, x)
        change = change.to(dtype).to(tl.float32)
    if terms > 2:
        before = _decoded(slopes, slopes_scales, at, channels, inside, in_width, x)
        bend = (change - reach * before).to(dtype).to(tl.float32)
        bend = (bend * (1.0 / (1.0 + reach))).to(dtype).to(tl.float32)
    return new, change, bend


@triton.jit
def _scale(largest):
    return tl.maximum(largest, 1e-12) * (1.0 / 127.0)


@triton.jit
def _store(data, x, scale, at, inside):
    # Adding 1.5 · 2^23 rounds to whole numbers, halves to even ones.
    steps = (tl.div_rn(x, tl.zeros_like(x) + scale[None, :]) + 12582912.0) - 12582912.0
    tl.store(data + at, steps.to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=("count", "reach"))
def keep_tokens_kernel(
    first,
    other,
    ids,
    last_a,
    last_b,
    last_scales_a,
    last_scales_b,
    slopes_a,
    slopes_b,
    slopes_scales_a,
    slopes_scales_b,
    data,
    scales,
    count,
    stride,
    reach,
    width: tl.constexpr,
    tokens: tl.constexpr,
    block: tl.constexpr,
    terms: tl.constexpr,
):
    """Grid: (numbers of a token, `width`, by `block`; tensors: 1 or 2). `ids`: [count] tokens that
    are kept; a tensor's tokens are `stride` numbers apart. `data`: [terms, tensors, count, width]
    int8; `scales`: [terms, tensors, width]. `terms`: 1, the tokens; 2, also their change since the
    `last` ones; 3, also what the line through the last ones and their `slopes` misses at `reach`
    (`step_cache`).
    """
    part, parts = tl.program_id(1), tl.num_programs(1)
    x, last, last_scales = first, last_a, last_scales_a
    slopes, slopes_scales = slopes_a, slopes_scales_a
    if part == 1:
        x, last, last_scales = other, last_b, last_scales_b
        slopes, slopes_scales = slopes_b, slopes_scales_b
    channels = tl.program_id(0) * block + tl.arange(0, block)
    in_width = channels < width

    largest = tl.zeros((block,), tl.float32)
    largest_change = tl.zeros((block,), tl.float32)
    largest_bend = tl.zeros((block,), tl.float32)
    for begin in range(0, count, tokens):
        new, change, bend = _terms(
            x, ids, begin, count, channels, in_width, last, last_scales, slopes, slopes_scales,
            stride, reach, width, tokens, terms,
        )  # fmt: skip
        largest = tl.maximum(largest, tl.max(tl.abs(new), axis=0))
        largest_change = tl.maximum(largest_change, tl.max(tl.abs(change), axis=0))
        largest_bend = tl.maximum(largest_bend, tl.max(tl.abs(bend), axis=0))
    scale, change_scale, bend_scale = _scale(largest), _scale(largest_change), _scale(largest_bend)

    size = count.to(tl.int64) * width
    to, to_scales = data + part * size, scales + part * width + channels
    for begin in range(0, count, tokens):
        new, change, bend = _terms(
            x, ids, begin, count, channels, in_width, last, last_scales, slopes, slopes_scales,
            stride, reach, width, tokens, terms,
        )  # fmt: skip
        number = begin + tl.arange(0, tokens)
        inside = (number < count)[:, None] & in_width[None, :]
        at = number.to(tl.int64)[:, None] * width + channels[None, :]
        _store(to, new, scale, at, inside)
        if terms > 1:
            _store(to + parts * size, change, change_scale, at, inside)
        if terms > 2:
            _store(to + 2 * parts * size, bend, bend_scale, at, inside)
    tl.store(to_scales, scale, mask=in_width)
    if terms > 1:
        tl.store(to_scales + parts * width, change_scale, mask=in_width)
    if terms > 2:
        tl.store(to_scales + 2 * parts * width, bend_scale, mask=in_width)
