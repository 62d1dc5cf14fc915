"""Muon in float32 steps as PyTorch's own does in bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from maskserve_studies.training.muon import Muon, orthogonal


def conditioned(shape: tuple[int, int]) -> torch.Tensor:
    """A random matrix with singular values from 1 to 10."""
    rank = min(shape)
    left, right = (torch.linalg.qr(torch.randn(side, rank))[0] for side in shape)
    return left @ torch.diag(torch.logspace(0, 1, rank)) @ right.T


@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (32, 32)])
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    values = torch.linalg.svdvals(orthogonal(conditioned(shape)))
    assert values.min() > 0.5
    assert values.max() < 1.3


@pytest.mark.parametrize("shape", [(24, 64), (64, 24)])
def test_three_steps_are_pytorchs_up_to_its_rounding(shape: tuple[int, int]) -> None:
    muon_weight, torch_weight = (nn.Parameter(torch.ones(shape)) for _ in range(2))
    torchs = torch.optim.Muon(
        [torch_weight], lr=0.1, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
    )
    muon = Muon([muon_weight], lr=0.1, weight_decay=0.01)
    for _ in range(3):
        muon_weight.grad = conditioned(shape)
        torch_weight.grad = muon_weight.grad.clone()
        muon.step()
        torchs.step()
    assert (muon_weight - torch_weight).norm() < 0.05 * (torch_weight - 1).norm()
