"""The optimizer Muon, in the precision that the processor computes fast.

torch.optim.Muon makes matrices orthogonal in bfloat16. That is slow on a processor without
instructions for bfloat16, where it takes most of a training step. With them, bfloat16 is twice as
fast as float32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

import torch
from torch import nn

# Keller Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024.
_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
_ITERATIONS: Final = 5
_CAPABILITIES: Final = torch.cpu.get_capabilities()
_PRECISION: Final = (
    torch.bfloat16
    if {"avx512_bf16", "amx_bf16"} & {name for name, has in _CAPABILITIES.items() if has}
    else torch.float32
)


class Muon(torch.optim.Optimizer):
    """Works like torch.optim.Muon with its defaults and `adjust_lr_fn="match_rms_adamw"`."""

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        lr: float,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step of all matrices that have a gradient."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                mean = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix))
                mean.lerp_(matrix.grad, 1 - group["momentum"])
                update = orthogonal(matrix.grad.lerp(mean, group["momentum"]))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * 0.2 * max(matrix.shape) ** 0.5)
        return None


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix with about the same singular vectors, and singular values of about 1."""
    a, b, c = _COEFFICIENTS
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = (x / x.norm().clamp(min=1e-7)).to(_PRECISION)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.to(matrix.dtype)
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def optimisers(
    learnt: nn.Module,
    matrices: Collection[nn.Parameter],
    rate: float,
    *,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.98),
) -> list[torch.optim.Optimizer]:
    """Muon for these matrices, AdamW for the other parameters that learn.

    Args:
        learnt: the module with all parameters.
        matrices: parameters of `learnt` for Muon.
        rate: peak learning rate.
        weight_decay: of the matrices.
        betas: AdamW's.
    """
    chosen = set(matrices)
    parameters = [p for p in learnt.parameters() if p.requires_grad]
    return [
        Muon([p for p in parameters if p in chosen], rate, weight_decay=weight_decay),
        torch.optim.AdamW(
            [p for p in parameters if p not in chosen], lr=rate, betas=betas, weight_decay=0.0
        ),
    ]
