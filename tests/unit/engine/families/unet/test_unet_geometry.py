"""Tiles and the moments of their maps, against what is counted position by position."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from maskserve_benchmarks.published_models import SD21, SDXL
from maskserve_benchmarks.step_counts import tile_bytes
from maskserve_common.imaging.masks import active_tokens_per_level
from maskserve_engine.families.unet.moments import Moments, normalise
from maskserve_engine.families.unet.spec import level_sizes, unet_work
from maskserve_engine.families.unet.tile import Frame, TileBox, tile_of
from maskserve_engine.planning.entry_bytes import FORMATS, map_bytes
from tests.support.draws import fresh_rng

pytestmark = pytest.mark.spread("seed")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_moments_are_taken_apart_and_put_together(seed: int, offset: float) -> None:
    """Sums of squares, the naive rival, lose the variance beside a large mean."""
    rng = np.random.default_rng(seed)
    old, new = (torch.from_numpy(rng.standard_normal((2, 8, 9, 11))) + offset for _ in range(2))
    top, integers = int(rng.integers(0, 5)), int(rng.integers(0, 5))
    box = TileBox(top, integers, top + int(rng.integers(1, 5)), integers + int(rng.integers(1, 6)))
    mixed = old.clone()
    box.cut(mixed).copy_(box.cut(new))
    inside = Moments.of(box.cut(new), 4)
    moved_moments = Moments.of(old, 4) - Moments.of(box.cut(old), 4) + inside
    expected = torch.var_mean(mixed.view(2, 4, -1), dim=2, correction=0)
    assert moved_moments.count == 9 * 11
    assert (moved_moments.variance - expected[0]).abs().max() < 1e-3
    assert (moved_moments.mean - expected[1]).abs().max() < 1e-4

    norm = nn.GroupNorm(4, 8)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    with torch.no_grad():
        normed = normalise(norm, box.cut(new).float(), moved_moments)
        assert (normed - box.cut(norm.double()(mixed))).abs().max() < 5e-3


def brute_reads(box: TileBox, stride: int) -> set[tuple[int, int]]:
    """Positions that a 3x3 convolution with padding 1 reads for a box of outputs."""
    outputs = itertools.product(range(box.top, box.bottom), range(box.left, box.right))
    around = list(itertools.product((-1, 0, 1), (-1, 0, 1)))
    return {(y * stride + a, x * stride + b) for y, x in outputs for a, b in around}


@pytest.mark.parametrize("seed", range(12))
def test_frames_hold_what_convolutions_read(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = level_sizes(int(rng.integers(5, 30)), int(rng.integers(5, 30)), 3)
    grid = rng.random(sizes[0]) < 0.02
    grid[int(rng.integers(sizes[0][0])), int(rng.integers(sizes[0][1]))] = True
    active = {}
    for level, (height, width) in enumerate(sizes):
        y, x = (np.unique(ids) for ids in (grid.nonzero()[0], grid.nonzero()[1]))
        touched = np.zeros((height, width), np.bool_)
        touched[np.ix_(np.unique(y >> level), np.unique(x >> level))] = True
        active[level] = np.flatnonzero(touched)
    tile = tile_of(active, sizes, int(rng.integers(1, 5)))
    for level, place in enumerate(tile):
        assert set(active[level]) <= set(place.inside.tolist())
        check_frame(place.near, place.box, place.size, brute_reads(place.box, 1))
        if level + 1 < len(tile):
            below = tile[level + 1].box
            check_frame(place.strided, place.box, place.size, brute_reads(below, 2))
            # What is upsampled to the box and the position round it lies in the coarser box.
            reads = {(y // 2, x // 2) for y, x in in_picture(brute_reads(place.box, 1), place.size)}
            assert reads <= positions(below)


def check_frame(
    frame: Frame, box: TileBox, size: tuple[int, int], reads: set[tuple[int, int]]
) -> None:
    assert positions(frame.reads) == reads
    assert positions(frame.region) == in_picture(reads, size)
    assert frame.whole is (positions(frame.region) == positions(box))
    picture = torch.arange(1.0, 1 + size[0] * size[1]).view(1, 1, *size)
    region = frame.region.cut(picture).flatten(2)
    cut = box.cut(picture)
    assert torch.equal(region[:, :, frame.box], cut.flatten(2))
    for ring in [region[:, :, frame.ring]] + [None] * frame.whole:
        latents = frame.read(frame.paste(cut, ring))
        assert torch.equal(latents, padded(picture, frame.reads))


def padded(x: torch.Tensor, reads: TileBox) -> torch.Tensor:
    """The part of x in a box that may reach beyond it, with zeros there."""
    far = max(map(abs, (reads.top, reads.left, reads.bottom, reads.right)))
    wide = F.pad(x, (far, far, far, far))
    height, width = reads.shape
    return wide[..., reads.top + far :, reads.left + far :][..., :height, :width]


def positions(box: TileBox) -> set[tuple[int, int]]:
    return set(itertools.product(range(box.top, box.bottom), range(box.left, box.right)))


def in_picture(reads: set[tuple[int, int]], size: tuple[int, int]) -> set[tuple[int, int]]:
    return {(y, x) for y, x in reads if 0 <= y < size[0] and 0 <= x < size[1]}


def test_what_a_tile_reads_and_gives_is_where_the_picture_has_it() -> None:
    rng = fresh_rng()
    sizes = [(18, 22), (9, 11), (5, 6)]
    rows, columns = np.sort(rng.integers(0, 18, 2)), np.sort(rng.integers(0, 22, 2))
    mask = np.zeros(sizes[0], np.uint8)
    mask[rows[0] : rows[1] + 1, columns[0] : columns[1] + 1] = 1
    active = active_tokens_per_level(mask, 1, range(3))
    for level, place in enumerate(tile_of(active, sizes, 2)):
        x = torch.randn(2, 3, *place.size)
        assert torch.equal(place.enter(x), padded(x, place.near.reads))
        zeros_like = torch.zeros_like(x)
        place.box.cut(zeros_like).copy_(place.box.cut(x))
        assert torch.equal(place.leave(place.box.cut(x)), zeros_like)
        if level < 2:
            coarse = torch.randn(2, 3, *sizes[level + 1])
            box = tile_of(active, sizes, 2)[level + 1].box
            wide = F.interpolate(coarse, size=place.size, mode="nearest")
            if any(n % 2 for n in place.size):  # the last one is alone
                wide = coarse.repeat_interleave(2, 2).repeat_interleave(2, 3)
                wide = wide[..., : place.size[0], : place.size[1]]
            assert torch.equal(place.upsampled(box.cut(coarse)), padded(wide, place.near.reads))


@pytest.mark.parametrize("halo", [1, 4])
def test_boxes_of_buckets_hold_those_that_are_needed(halo: int) -> None:
    rng = fresh_rng()
    sizes = level_sizes(128, 96, 3)
    shapes = set()
    for _ in range(60):
        top, integers = rng.integers(0, 128), rng.integers(0, 96)
        mask = np.zeros(sizes[0], np.uint8)
        mask[top : top + rng.integers(1, 64), integers : integers + rng.integers(1, 64)] = 1
        active = active_tokens_per_level(mask, 1, range(3))
        exact, bucketed = (tile_of(active, sizes, halo, buckets=flag) for flag in (False, True))
        finer = (0, 0)
        for place, of, size in zip(bucketed, exact, sizes, strict=True):
            assert positions(of.box) <= positions(place.box) <= positions(TileBox(0, 0, *size))
            # A coarser one also holds what the finer one reads, which grew.
            for side, side_of, read in zip(place.box.shape, of.box.shape, finer, strict=True):
                needed = max(side_of, read)
                assert side <= max(needed + 4, 1.25 * needed + 2)
            finer = tuple(side // 2 + 2 for side in place.box.shape)
        for place, below in itertools.pairwise(bucketed):
            reads = in_picture(brute_reads(place.box, 1), place.size)
            assert {(y // 2, x // 2) for y, x in reads} <= positions(below.box)
        shapes.add(bucketed[0].box.shape[0])
    assert len(shapes) <= 32


@pytest.mark.parametrize("config", [SD21, SDXL])
@pytest.mark.parametrize(("ratio", "halo"), [(0.05, 1), (0.05, 4), (0.2, 1), (0.2, 4), (0.5, 4)])
def test_bytes_of_a_square_tile_are_about_those_that_are_loaded(
    config: dict[str, Any], ratio: float, halo: int
) -> None:
    """But for what strided convolutions read beyond it, and where boxes meet the picture's edge."""
    side = int(config["sample_size"])
    work, fmt = unet_work(config, side, side, guidance=False, halo=halo), FORMATS["bfloat16"]
    mask = np.zeros((side, side), np.uint8)
    wide = round(math.sqrt(ratio) * side)
    begin = (side - wide) // 2
    mask[begin : begin + wide, begin : begin + wide] = 1
    active = active_tokens_per_level(mask, 1, range(len(work.tokens)))
    tile = tile_of(active, level_sizes(side, side, len(work.tokens)), halo)
    loaded = sum(
        fmt.bytes_of(
            len(tile[map_work.level].of_template(strided=map_work.strided)), map_work.width
        )
        for map_work in work.maps
    )
    counted = tile_bytes(work, work.row_at(ratio, 77), fmt)
    assert 0.7 * loaded < counted.sum() < 1.3 * loaded
    assert counted.sum() < map_bytes(work, fmt)
