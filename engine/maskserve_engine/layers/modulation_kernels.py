"""The kernels of `modulation`, in the Triton language (the package `triton`; not the server).

One program handles one token of `width` contiguous numbers. It reads its row's vectors in place:
spread over the tokens they would be as large as six streams of tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from maskserve_engine.layers.fp8_kernels import in_fp8, scale_of


@triton.jit
def _wide(at, inside):
    """Load as float32; 0 outside."""
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _normed(wide, inside, eps, width: tl.constexpr):
    """Normalise a token [block], 0 outside."""
    centred = tl.where(inside, wide - tl.sum(wide, axis=0) / width, 0.0)
    variance = tl.sum(centred * centred, axis=0) / width
    return centred * (1.0 / tl.sqrt(variance + eps))


@triton.jit
def _store(
    out,
    scales,
    token,
    at,
    inside,
    value,
    width: tl.constexpr,
    dtype: tl.constexpr,
    fp8: tl.constexpr,
):
    """Store a token, quantised if `fp8`."""
    out_at = out + token * width + at
    if fp8:
        value = tl.where(inside, value, 0.0).to(dtype).to(tl.float32)
        scale = scale_of(tl.max(tl.abs(value), axis=0))
        tl.store(out_at, in_fp8(value, scale), mask=inside)
        tl.store(scales + token, scale)
    else:
        tl.store(out_at, value, mask=inside)


@triton.jit
def modulate_kernel(
    x,
    shifts,
    scales,
    row_of,
    out,
    out_scales,
    shifts_stride,
    scales_stride,
    eps,
    width: tl.constexpr,
    block: tl.constexpr,
    one_row: tl.constexpr,
    fp8: tl.constexpr,
):
    """Grid: (tokens,). Strides of vectors are between rows. `one_row`: all tokens use the first
    vectors, and `row_of` is not read. `fp8`: tokens are quantised, each with a scale.
    """
    token = tl.program_id(0).to(tl.int64)
    row = token * 0
    if not one_row:
        row = tl.load(row_of + token)
    at = tl.arange(0, block)
    inside = at < width
    normed = _normed(_wide(x + token * width + at, inside), inside, eps, width)
    normed = normed.to(x.dtype.element_ty).to(tl.float32)
    shift = _wide(shifts + row * shifts_stride + at, inside)
    scale = _wide(scales + row * scales_stride + at, inside)
    modulated = shift + normed * scale
    _store(out, out_scales, token, at, inside, modulated, width, x.dtype.element_ty, fp8)


@triton.jit
def add_gated_kernel(
    x,
    y,
    gates,
    row_of,
    out,
    gates_stride,
    width: tl.constexpr,
    block: tl.constexpr,
):
    """Grid: (tokens,). The stride of gates is between rows."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(row_of + token)
    at = tl.arange(0, block)
    inside = at < width
    residual = _wide(x + token * width + at, inside)
    added = _wide(y + token * width + at, inside)
    gate = _wide(gates + row * gates_stride + at, inside)
    tl.store(out + token * width + at, residual + gate * added, mask=inside)


@triton.jit
def add_gated_modulate_kernel(
    x,
    y,
    gates,
    shifts,
    scales,
    row_of,
    added,
    out,
    out_scales,
    gates_stride,
    shifts_stride,
    scales_stride,
    eps,
    width: tl.constexpr,
    block: tl.constexpr,
    one_row: tl.constexpr,
    fp8: tl.constexpr,
):
    """Both kernels in one; the tokens before the norm are written, too."""
    token = tl.program_id(0).to(tl.int64)
    row = token * 0
    if not one_row:
        row = tl.load(row_of + token)
    at = tl.arange(0, block)
    inside = at < width
    gate = _wide(gates + row * gates_stride + at, inside)
    update = _wide(y + token * width + at, inside)
    summed = _wide(x + token * width + at, inside) + gate * update
    summed = summed.to(x.dtype.element_ty)
    tl.store(added + token * width + at, summed, mask=inside)
    normed = _normed(summed.to(tl.float32), inside, eps, width)
    normed = normed.to(x.dtype.element_ty).to(tl.float32)
    shift = _wide(shifts + row * shifts_stride + at, inside)
    scale = _wide(scales + row * scales_stride + at, inside)
    modulated = shift + normed * scale
    _store(out, out_scales, token, at, inside, modulated, width, x.dtype.element_ty, fp8)
