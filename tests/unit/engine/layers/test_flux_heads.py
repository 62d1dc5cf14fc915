"""The kernel that norms and turns queries and keys, interpreted, against the plain path."""

from __future__ import annotations

import pytest
import torch

from maskserve_engine.layers.qk_norm_rope import qk_norm_rope
from tests.support.interpreted import run_interpreted

PROGRAM = """
import torch
import torch.nn.functional as F
from maskserve_engine.layers.qk_norm_rope import fused, qk_norm_rope, rotate

for seed in range(12):
    torch.manual_seed(seed)
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    tokens, parts = int(torch.randint(1, 9, ())), 1 + seed % 2
    heads, head_dim = ((1, 8), (3, 32), (4, 64), (24, 128))[seed % 4]
    wide = torch.randn(tokens, parts * heads * head_dim + 7).to(dtype)
    x = wide[:, : parts * heads * head_dim].unflatten(-1, (parts, heads, head_dim))
    streams = None if seed % 3 else torch.randint(0, 3, (tokens,))
    norms = torch.randn(*(() if streams is None else (3,)), parts, 1, head_dim)
    each = norms if streams is None else norms[streams]
    cis = torch.polar(torch.ones(tokens, head_dim // 2), torch.randn(tokens, head_dim // 2))
    normed, beside = F.rms_norm(x, (head_dim,), None, 1e-6) * each, wide[:, -7:].clone()
    plain = rotate(normed, cis, dtype)
    in_place = x.clone()
    qk_norm_rope(in_place, norms, cis, streams)
    assert torch.equal(in_place, plain)
    # The interpreter cuts bfloat16 off where hardware and torch round, twice.
    ulps = {torch.float32: 1e-6, torch.bfloat16: 2**-6, torch.float16: 2**-10}[dtype]
    fused(x, norms, cis, streams)
    torch.testing.assert_close(x, plain, rtol=ulps, atol=4 * ulps)
    assert torch.equal(wide[:, -7:], beside)
"""


def test_the_kernel_computes_what_the_plain_path_computes() -> None:
    pytest.importorskip("triton")
    run_interpreted(PROGRAM)


def test_each_head_is_normed_and_turned_by_itself() -> None:
    x = torch.randn(5, 2, 3, 8)
    norms = torch.randn(2, 1, 8)
    angles = torch.randn(5, 4)
    turned = x.clone()
    qk_norm_rope(turned, norms, torch.polar(torch.ones(5, 4), angles))
    one = x[3, 1, 2] / (x[3, 1, 2].square().mean() + 1e-6).sqrt() * norms[1, 0]
    for pair, angle in enumerate(angles[3]):
        a, b = one[2 * pair], one[2 * pair + 1]
        expected = torch.stack(
            (a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos())
        )
        torch.testing.assert_close(turned[3, 1, 2, 2 * pair : 2 * pair + 2], expected)
