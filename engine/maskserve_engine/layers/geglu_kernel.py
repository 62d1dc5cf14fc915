"""The kernel of `geglu`, in the Triton language (the package `triton`; not the server)."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 1024
"""Numbers per program: eight for each thread, loaded as 16 bytes."""


@triton.jit
def geglu_kernel(x, out, width: tl.constexpr, block: tl.constexpr):
    """Grid: (tokens, blocks of `width`). GELU is rounded to the dtype of `x` before the product, as
    if the two were separate operations.
    """
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    first = x + token * 2 * width
    hidden = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(first + width + at, mask=inside, other=0.0).to(tl.float32)
    gelu = (0.5 * gates * (1.0 + tl.erf(gates * 0.7071067811865476))).to(x.dtype.element_ty)
    tl.store(out + token * width + at, hidden * gelu.to(tl.float32), mask=inside)
