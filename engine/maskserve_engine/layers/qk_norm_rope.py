"""Queries and keys before attention: a norm per head, then rotary embedding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from maskserve_engine.layers.kernels import has_kernels, operation, stand_in
from maskserve_engine.layers.modulation import EPS


def rotate(x: Tensor, cis: Tensor, dtype: torch.dtype) -> Tensor:
    """Apply rotary embedding to `x` [N, P, heads, head_dim]; `cis` as in `qk_norm_rope`."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * cis[:, None, None]).flatten(-2).to(dtype)


def qk_norm_rope(
    x: Tensor,
    norms: Tensor,
    cis: Tensor,
    stream_of: Tensor | None = None,
    epsilon: float = EPS,
) -> None:
    """Normalise each head and apply rotary embedding (`rotate`), in place.

    Args:
        x: [N, P, heads, head_dim] queries and keys (P = 2), or keys (P = 1); written to.
        norms: [P, 1, head_dim] weights, float32, or [S, P, 1, head_dim] by stream.
        cis: [N, head_dim / 2] complex rotary factors.
        stream_of: [N] stream of each token, if `norms` are by stream.
        epsilon: epsilon of the norms.
    """
    if has_kernels(x.device) and x.shape[-1].bit_count() == 1:
        fused(x, norms, cis, stream_of, epsilon)
        return
    stream_norms = norms if stream_of is None else norms.index_select(0, stream_of)
    normed = F.rms_norm(x, x.shape[-1:], None, epsilon) * stream_norms  # float32
    if x.dtype == torch.float32:
        pairs = *x.shape[:-1], x.shape[-1] // 2, 2  # each two numbers of a head as a complex one
        to = torch.view_as_complex(x.view(pairs))
        torch.mul(torch.view_as_complex(normed.view(pairs)), cis[:, None, None], out=to)
    else:
        x.copy_(rotate(normed, cis, x.dtype))


def fused(
    x: Tensor,
    norms: Tensor,
    cis: Tensor,
    stream_of: Tensor | None = None,
    epsilon: float = EPS,
) -> None:
    """Run `qk_norm_rope` as one kernel; a token's heads must be adjacent, and head_dim a power of
    two.
    """
    torch.ops.maskserve.qk_norm_rope(x, norms, torch.view_as_real(cis), stream_of, epsilon)


@operation("qk_norm_rope", mutates_args=("x",))
def _qk_norm_rope(
    x: Tensor, norms: Tensor, cis: Tensor, stream_of: Tensor | None, epsilon: float
) -> None:
    import triton

    from maskserve_engine.layers.qk_norm_rope_kernel import qk_norm_rope_kernel

    tokens, parts, heads, head_dim = x.shape
    qk_norm_rope_kernel[(tokens, parts)](
        x,
        norms,
        cis,
        x if stream_of is None else stream_of,
        x.stride(0),
        epsilon,
        heads=heads,
        head_dim=head_dim,
        block=triton.next_power_of_2(heads),
        streams=stream_of is not None,
    )


@stand_in("qk_norm_rope")
def _(*_: Any) -> None:
    return None
