"""Queries and keys before attention: each head through its norm, then rotary embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from maskserve_engine.layers.kernels import has_kernels
from maskserve_engine.layers.modulation import EPS


def norm_heads(x: Tensor, norms: Tensor) -> Tensor:
    """`x` [N, P, heads, head_dim], each head through its norm: float32, as `rotate` takes it."""
    return F.rms_norm(x, x.shape[-1:], None, EPS) * norms


def rotate(x: Tensor, cis: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotary embedding of `x` [N, P, heads, head_dim], as `dtype`; `cis` as in `qk_norm_rope`."""
    pairs = torch.view_as_complex(x.view(*x.shape[:-1], x.shape[-1] // 2, 2))
    return torch.view_as_real(pairs * cis[:, None, None]).flatten(-2).to(dtype)


def qk_norm_rope(x: Tensor, norms: Tensor, cis: Tensor) -> Tensor:
    """`norm_heads`, then `rotate`.

    Args:
        x: [N, P, heads, head_dim] queries and keys, or keys alone: P is 2 or 1.
        norms: [P, 1, head_dim] weights, float32, or [N, P, 1, head_dim] of each token's.
        cis: [N, head_dim / 2] complex rotary factors.

    Returns:
        [N, P, heads, head_dim] in the dtype of `x`.
    """
    if has_kernels(x) and x.shape[-1].bit_count() == 1:
        return fused(x, norms, cis)
    return rotate(norm_heads(x, norms), cis, x.dtype)


def fused(x: Tensor, norms: Tensor, cis: Tensor) -> Tensor:
    """`qk_norm_rope` as one kernel; a token's heads are adjacent, head_dim is a power of two."""
    rotated: Tensor = torch.ops.maskserve.qk_norm_rope(x, norms, torch.view_as_real(cis))
    return rotated


@torch.library.custom_op("maskserve::qk_norm_rope", mutates_args=())
def _qk_norm_rope(x: Tensor, norms: Tensor, cis: Tensor) -> Tensor:
    import triton

    from maskserve_engine.layers.qk_norm_rope_kernel import qk_norm_rope_kernel

    tokens, parts, heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    qk_norm_rope_kernel[(tokens, parts)](
        x,
        norms,
        cis,
        out,
        x.stride(0),
        norms.stride(0) if norms.dim() == 4 else 0,
        EPS,
        heads=heads,
        head_dim=head_dim,
        block=triton.next_power_of_2(heads),
    )
    return out


@_qk_norm_rope.register_fake
def _(x: Tensor, norms: Tensor, cis: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
