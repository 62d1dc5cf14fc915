"""The kernels of `fp8`, in the Triton language (the package `triton`; not the server)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_of(largest):
    """Return a token's scale from its largest absolute number."""
    return tl.maximum(largest, 1e-12) / 448.0


@triton.jit
def in_fp8(wide, scale):
    return tl.minimum(tl.maximum(wide / scale, -448.0), 448.0).to(tl.float8e4nv)


@triton.jit
def quantise_kernel(
    x,
    up,
    out,
    scales,
    x_stride,
    up_stride,
    width: tl.constexpr,
    more: tl.constexpr,
    block: tl.constexpr,
    more_block: tl.constexpr,
):
    """Grid: (tokens,). Writes `width` numbers of `x`, then GELU (tanh) of `more` numbers of `up`;
    either may be 0.
    """
    token = tl.program_id(0).to(tl.int64)
    out_row = out + token * (width + more)
    at = tl.arange(0, block)
    wide = tl.load(x + token * x_stride + at, mask=at < width, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(wide), axis=0)
    if more:
        behind = tl.arange(0, more_block)
        z = tl.load(up + token * up_stride + behind, mask=behind < more, other=0.0).to(tl.float32)
        inner = 0.7978845608028654 * (z + 0.044715 * z * z * z)
        # tanh(x) = 1 - 2 / (exp(2x) + 1)
        z = 0.5 * z * (2.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0))
        z = z.to(x.dtype.element_ty).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(z), axis=0))
        scale = scale_of(largest)
        tl.store(out_row + width + behind, in_fp8(z, scale), mask=behind < more)
    scale = scale_of(largest)
    tl.store(out_row + at, in_fp8(wide, scale), mask=at < width)
    tl.store(scales + token, scale)
