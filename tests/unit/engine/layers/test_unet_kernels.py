"""The kernels between a UNet block's products, interpreted, against plain operations."""

from __future__ import annotations

import pytest

from tests.support.examples import WHOLE
from tests.support.interpreted import run_interpreted

pytest.importorskip("triton")

PROGRAM = """
import sys
import torch
from torch import nn
from maskserve_engine.layers import add_norm, geglu

for seed in map(int, sys.argv[1:]):
    torch.manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high, ()))
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    near = dict(rtol=1e-5, atol=1e-5) if seed % 3 == 0 else dict(rtol=2e-2, atol=2e-2)
    tokens, width = draw(1, 6), draw(1, 1200)
    x, y = (2 * torch.randn(tokens, 2 * width).to(dtype) for _ in range(2))
    if seed % 2:  # as they lie in what a product has made for others, too
        x, y = x[:, :width], y[:, width:]
    norm = nn.LayerNorm(x.shape[1], eps=1e-5).to(dtype).requires_grad_(False)
    norm.weight.copy_(torch.randn(x.shape[1])), norm.bias.copy_(torch.randn(x.shape[1]))
    expected = add_norm.add_norm(x, y, norm)
    found = torch.ops.maskserve.add_norm(x, y, norm.weight, norm.bias, norm.eps)
    for one, other in zip(expected, found):
        torch.testing.assert_close(one, other, **near)
    both = 3 * torch.randn(2 * width, tokens).to(dtype).T
    torch.testing.assert_close(geglu.geglu(both), torch.ops.maskserve.geglu(both), **near)
"""


def test_they_compute_what_plain_operations_do() -> None:
    seeds = range(6) if WHOLE else range(3)  # each type
    run_interpreted(PROGRAM, *map(str, seeds))
