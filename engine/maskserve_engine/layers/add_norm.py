"""A residual added to tokens, and the norm that reads the sum next."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskserve_engine.layers.kernels import has_kernels, operation, stand_in


def add_norm(x: Tensor, y: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """Return x + y, and the sum through `norm`; both tensors are [N, D]."""
    if has_kernels(x.device):
        sum_and_norm: tuple[Tensor, Tensor] = torch.ops.maskserve.add_norm(
            x, y, norm.weight, norm.bias, norm.eps
        )
        return sum_and_norm
    added = x + y
    return added, F.layer_norm(added, added.shape[-1:], norm.weight, norm.bias, norm.eps)


@operation("add_norm")
def _add_norm(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    import triton

    from maskserve_engine.layers.add_norm_kernel import add_norm_kernel

    x, y = x.contiguous(), y.contiguous()  # as the kernel takes it for granted
    tokens, width = x.shape
    added, normed = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(width)
    add_norm_kernel[(tokens,)](x, y, weight, bias, added, normed, eps, width, block)
    return added, normed


@stand_in("add_norm")
def _(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)
