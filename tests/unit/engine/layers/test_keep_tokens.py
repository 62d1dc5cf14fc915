"""The kernels that keep what a refresh step computed, interpreted, against the plain path."""

from __future__ import annotations

import pytest

from tests.support.draws import fresh_seed
from tests.support.interpreted import run_interpreted

pytest.importorskip("triton")

TOKENS = """
import sys

import torch

from maskserve_engine.layers import keep_tokens as module
from maskserve_engine.layers.keep_tokens import keep_tokens

torch.manual_seed(int(sys.argv[1]))
for dtype in (torch.float32, torch.float16):
    for parts, count, kept in ((1, 40, 7), (2, 150, 130), (2, 9, 0)):
        width = 40
        ids = torch.randperm(count)[:kept].sort().values
        last = None
        for reach in (None, None, 0.7, 0.3):
            packed = (3 * torch.randn(count, 3, width)).to(dtype)
            packed[:, :, 5] = 0.0
            tensors = packed[:, 1 : 1 + parts].unbind(1)
            found = []
            for fused in (False, True):
                module.has_kernels = lambda device: fused
                found.append(keep_tokens(tensors, ids, "int8", last, reach))
            last = found[0]
            for of, other in zip(*found, strict=True):
                for coded, kernel in zip(of, other, strict=True):
                    # In half precision the plain path rounds once more on its way.
                    near = 1e-6 if dtype == torch.float32 else 2e-3
                    torch.testing.assert_close(kernel.data, coded.data, rtol=0, atol=1)
                    torch.testing.assert_close(kernel.scale, coded.scale, rtol=near, atol=0)
                    if kept:
                        other_steps = (kernel.data != coded.data).float().mean()
                        assert other_steps < (0.01 if dtype == torch.float32 else 0.1)
        assert all(len(of) == parts for of in found[1])
"""

RINGS = """
import sys

import torch

from maskserve_engine.families.unet import extrapolation as module
from maskserve_engine.families.unet.extrapolation import StepCacheSurroundings
from maskserve_engine.families.unet.tile import tile_of
from maskserve_engine.planning.flops import FeatureMap

torch.manual_seed(int(sys.argv[1]))
draw = lambda low, high: int(torch.randint(low, high, ()))
sizes = [(12, 16), (6, 8), (3, 4)]
for _ in range(6):
    at = draw(0, 12), draw(0, 16)
    active = {level: torch.tensor([(at[0] >> level) * width + (at[1] >> level)]).numpy()
              for level, (_, width) in enumerate(sizes)}
    tile = tile_of(active, sizes, draw(1, 4), buckets=bool(draw(0, 2)))
    maps = [FeatureMap(level, 8 * draw(1, 4), 4, strided, 0)
            for level, strided in ((0, False), (1, False), (0, True), (2, False))]
    seen = [(1.0 + torch.randn(2, each.width, *sizes[each.level])) for each in maps]
    rooms = []
    for fused in (False, True):
        module.has_kernels = lambda device: fused
        around = StepCacheSurroundings(tile, maps, 2, torch.float32, 1.0, lambda: (0, 1.0))
        for number, x in enumerate(seen):
            for n in range(2):
                around.see(n, number, x[n], 4)
        rooms.append(around._new)
    for read, plain in rooms[0].around.items():
        frame, kernel = tile[read.level].frame(strided=read.strided), rooms[1].around[read]
        if frame.whole:
            continue
        torch.testing.assert_close(kernel.ring, plain.ring, rtol=0, atol=0)
        if plain.outside is not None:
            near = dict(rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(kernel.outside.mean, plain.outside.mean, **near)
            torch.testing.assert_close(kernel.outside.variance, plain.outside.variance, **near)
"""


def test_tokens_are_kept_as_by_plain_operations() -> None:
    """The first time, with their change, and with the bend of their line. Some numbers are zero in
    all tokens, and a row may keep none.
    """
    run_interpreted(TOKENS, str(fresh_seed()))


def test_rings_and_moments_are_kept_as_by_plain_operations() -> None:
    run_interpreted(RINGS, str(fresh_seed()))
