"""GEGLU: one half of a gated feed-forward product times GELU of the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from maskserve_engine.layers.kernels import has_kernels, operation, stand_in


def geglu(x: Tensor) -> Tensor:
    """Return [N, D] from [N, 2 · D]: the first half times GELU (exact) of the second."""
    if has_kernels(x.device):
        activated: Tensor = torch.ops.maskserve.geglu(x)
        return activated
    hidden, gates = x.chunk(2, dim=1)
    return hidden * F.gelu(gates)


@operation("geglu")
def _geglu(x: Tensor) -> Tensor:
    import triton

    from maskserve_engine.layers.geglu_kernel import BLOCK, geglu_kernel

    x = x.contiguous()  # as the kernel takes it for granted
    tokens, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(tokens, width)
    geglu_kernel[(tokens, triton.cdiv(width, BLOCK))](x, out, width, BLOCK)
    return out


@stand_in("geglu")
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2)
