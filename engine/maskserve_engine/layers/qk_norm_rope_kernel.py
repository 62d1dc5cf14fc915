"""The kernel of `qk_norm_rope`, in the Triton language (the package `triton`; not the server).

One program handles all heads of one token's queries, or of its keys. As operations of torch the
same takes five kernels, which pass every number through device memory in float32. Results replace
the inputs, because a lone row's products already lie among all its keys.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def qk_norm_rope_kernel(
    x,
    norms,
    cis,
    stream_of,
    x_stride,
    eps,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    block: tl.constexpr,
    streams: tl.constexpr,
):
    """Grid: (tokens, 1 or 2 parts). The stride is between tokens; a part's heads are adjacent.
    `head_dim` is a power of two. `streams`: norms are by stream, and `stream_of` is read.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    dtype = x.dtype.element_ty
    norm = norms + part * head_dim
    if streams:
        norm += tl.load(stream_of + token) * tl.num_programs(1) * head_dim
    at = tl.arange(0, head_dim)
    head = tl.arange(0, block)[:, None]
    inside = head < heads
    head_at = x + token * x_stride + part * heads * head_dim + head * head_dim + at[None, :]

    wide = tl.load(head_at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(wide * wide, axis=1) / head_dim
    normed = (wide * (1.0 / tl.sqrt(mean + eps))[:, None]).to(dtype).to(tl.float32)
    normed *= tl.load(norm + at)[None, :]

    real, imaginary = tl.split(tl.reshape(normed, (block, head_dim // 2, 2)))
    cos, sin = tl.split(tl.reshape(tl.load(cis + token * head_dim + at), (head_dim // 2, 2)))
    cos, sin = cos[None, :], sin[None, :]
    turned = tl.join(real * cos - imaginary * sin, real * sin + imaginary * cos)
    turned = tl.reshape(turned, (block, head_dim)).to(dtype)
    tl.store(head_at, turned, mask=inside)
