"""Outside the mask the answer is the decoded source, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from tests.fakes.pictures import OddImage, blob_mask, encode, odd_images, scene
from tests.support.calls import Grpc, edit_inputs, pixels

ODD = list(odd_images())
SIZES = [(1, 1), (1, 9), (17, 3), (33, 129), (129, 33), (64, 64), (65, 63), (200, 150), (150, 201)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(grpc: Grpc, size: tuple[int, int]) -> None:
    source, mask = scene(*size), blob_mask(*size)
    image, _ = grpc.edit(edit_inputs(source, mask))
    edited = pixels(image)
    assert edited.shape == source.shape
    assert np.array_equal(edited[mask == 0], source[mask == 0])


@pytest.mark.parametrize("odd", ODD, ids=[odd.name for odd in ODD])
def test_odd_sources(grpc: Grpc, odd: OddImage) -> None:
    mask = blob_mask(*odd.pixels.shape[:2])
    image, _ = grpc.edit(edit_inputs(odd.encoded, mask))
    edited = pixels(image)
    assert np.array_equal(edited[mask == 0], odd.pixels[mask == 0])
    assert not np.array_equal(edited[mask > 0], odd.pixels[mask > 0])


@pytest.mark.parametrize("at", [(0, 0), (44, 60), (20, 30), (44, 0)], ids=str)
def test_one_pixel_masks(grpc: Grpc, at: tuple[int, int]) -> None:
    source, mask = scene(45, 61), np.zeros((45, 61), np.uint8)
    mask[at] = 255
    image, meta = grpc.edit(edit_inputs(source, mask, mask_ring=0))
    outside = mask == 0
    assert np.array_equal(pixels(image)[outside], source[outside])
    assert 1 <= meta["active_tokens"] <= 4
    _, ringed = grpc.edit(edit_inputs(source, mask))
    assert meta["active_tokens"] < ringed["active_tokens"] <= 16


def test_all_white_masks_edit_everything(grpc: Grpc) -> None:
    source, mask = scene(45, 61), np.full((45, 61), 255, np.uint8)
    image, meta = grpc.edit(edit_inputs(source, mask))
    assert meta["mask_ratio"] == 1
    assert (pixels(image) != source).any(axis=2).mean() > 0.9


def test_transparency_edits_where_the_mask_has_alpha(grpc: Grpc) -> None:
    source, blob = scene(45, 61), blob_mask(45, 61)
    clear = np.dstack([np.zeros((45, 61, 3), np.uint8), 255 - blob])
    by_alpha, _ = grpc.edit(edit_inputs(source, encode(clear)))
    by_white, _ = grpc.edit(edit_inputs(source, blob))
    assert by_alpha == by_white


def test_dilate_and_feather_move_the_border(grpc: Grpc) -> None:
    source, mask = scene(64, 64), np.zeros((64, 64), np.uint8)
    mask[28:36, 28:36] = 255
    image, _ = grpc.edit(edit_inputs(source, mask, mask_dilate=4, mask_feather=3))
    changed = (pixels(image) != source).any(axis=2)
    rows, columns = np.nonzero(changed)
    assert rows.min() < 28
    assert columns.max() > 35
    # Grown by 4, faded over 3 more.
    assert rows.min() >= 28 - 8
    assert columns.max() <= 35 + 8
