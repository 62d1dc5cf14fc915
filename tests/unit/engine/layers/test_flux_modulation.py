"""The kernels that modulate tokens by their rows' vectors, interpreted, against the plain path."""

from __future__ import annotations

import pytest

from tests.support.examples import WHOLE
from tests.support.interpreted import run_interpreted

PROGRAM = """
import sys
import torch
from maskserve_engine.layers import modulation
from maskserve_engine.layers.modulation import Norm, PerRow, add_gated, modulate

modulation.has_kernels = lambda x: True


def spread(x):
    return torch.stack((x, torch.full_like(x, torch.nan)), dim=-1)[..., 0]


def added(x, gate, y):
    return add_gated(x, gate, y)[0]


def turned(vectors):
    twice = torch.stack((vectors.row_of, vectors.row_of + 99), dim=-1)[..., 0]
    return PerRow(vectors.values.t().clone().t(), twice)


for seed in map(int, sys.argv[1:]):
    torch.manual_seed(seed)
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    width, rows = (8, 96, 128)[seed // 3], int(torch.randint(2, 5, ()))
    row_of = torch.repeat_interleave(torch.arange(rows), torch.randint(0, 6, (rows,)))
    x, y = (3 * torch.randn(len(row_of), width).to(dtype) for _ in range(2))
    parts = torch.randn(rows, 3 * width).to(dtype).chunk(3, dim=1)
    looked_up = [PerRow(part, row_of) for part in parts]
    shift, scale, gate = (part[row_of] for part in parts)
    one = [part[0] for part in parts]  # of all tokens, as a single row has them
    # The interpreter cuts bfloat16 off where hardware and torch round, twice.
    ulps = {torch.float32: 1e-6, torch.bfloat16: 2**-6, torch.float16: 2**-10}[dtype]
    for result, expected in (
        (modulate(x, *looked_up[:2]), modulate(x, shift, scale)),
        (added(x, looked_up[2], y), added(x, gate, y)),
        # Parts of something wider, and what was turned round.
        (modulate(spread(x), *looked_up[:2]), modulate(x, shift, scale)),
        (modulate(x.t().clone().t(), *looked_up[:2]), modulate(x, shift, scale)),
        (modulate(x, *map(turned, looked_up[:2])), modulate(x, shift, scale)),
        (added(spread(x), looked_up[2], y), added(x, gate, y)),
        (added(x, turned(looked_up[2]), spread(y)), added(x, gate, y)),
        (added(x.t().clone().t(), looked_up[2], y), added(x, gate, y)),
    ):
        torch.testing.assert_close(result, expected, rtol=ulps, atol=8 * ulps)
    for tokens, more, (shift, scale, gate) in (
        (x, y, looked_up),
        (spread(x), x.t().clone().t(), [turned(each) for each in looked_up]),
        (x, y, one),
    ):
        both = add_gated(tokens, gate, more, Norm(shift, scale))
        modulation.has_kernels = lambda x: False
        expected = added(tokens, gate, more)
        torch.testing.assert_close(both[0], expected, rtol=ulps, atol=8 * ulps)
        # What the kernel norms is the sum that it answers.
        expected = modulate(both[0], shift, scale)
        torch.testing.assert_close(both[1], expected, rtol=ulps, atol=8 * ulps)
        modulation.has_kernels = lambda x: True
"""


def test_the_kernels_compute_what_the_plain_path_computes() -> None:
    pytest.importorskip("triton")
    seeds = range(9) if WHOLE else (0, 4, 8)  # each type, each width
    run_interpreted(PROGRAM, *map(str, seeds))
