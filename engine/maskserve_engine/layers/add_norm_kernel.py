"""The kernel of `add_norm`, in the Triton language (the package `triton`; not the server)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_norm_kernel(
    x,
    y,
    weight,
    bias,
    added,
    normed,
    eps,
    width: tl.constexpr,
    block: tl.constexpr,
):
    """Grid: (tokens,). The norm reads the sum as it is stored, rounded to the tokens' dtype."""
    first = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, block)
    inside = at < width
    total = tl.load(x + first + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(y + first + at, mask=inside, other=0.0).to(tl.float32)
    stored_sum = total.to(x.dtype.element_ty)
    tl.store(added + first + at, stored_sum, mask=inside)
    wide = stored_sum.to(tl.float32)
    centred = tl.where(inside, wide - tl.sum(wide, axis=0) / width, 0.0)
    variance = tl.sum(centred * centred, axis=0) / width
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + first + at, centred * (1.0 / tl.sqrt(variance + eps)) * scale + shift, inside)
