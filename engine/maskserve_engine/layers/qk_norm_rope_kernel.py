"""The kernel of `qk_norm_rope`, in the Triton language (the package `triton`; not the server).

One program turns all heads of one token's queries, or of its keys. As operations of torch the same
are five kernels, and between them every number goes through the device's memory in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def qk_norm_rope_kernel(
    x,
    norms,
    cis,
    out,
    x_stride,
    norms_stride,
    eps,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    block: tl.constexpr,
):
    """Grid: (tokens, 1 or 2 parts). Strides are from token to token; a part's heads lie one behind
    the other. `head_dim` is a power of two.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    dtype = x.dtype.element_ty
    at = tl.arange(0, head_dim)
    head = tl.arange(0, block)[:, None]
    inside = head < heads
    offsets = part * heads * head_dim + head * head_dim + at[None, :]

    wide = tl.load(x + token * x_stride + offsets, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(wide * wide, axis=1) / head_dim
    normed = (wide * (1.0 / tl.sqrt(mean + eps))[:, None]).to(dtype).to(tl.float32)
    normed *= tl.load(norms + token * norms_stride + part * head_dim + at)[None, :]

    real, imaginary = tl.split(tl.reshape(normed, (block, head_dim // 2, 2)))
    cos, sin = tl.split(tl.reshape(tl.load(cis + token * head_dim + at), (head_dim // 2, 2)))
    cos, sin = cos[None, :], sin[None, :]
    turned = tl.join(real * cos - imaginary * sin, real * sin + imaginary * cos)
    turned = tl.reshape(turned, (block, head_dim)).to(dtype)
    tokens_stride = tl.num_programs(1) * heads * head_dim
    tl.store(out + token * tokens_stride + offsets, turned, mask=inside)
