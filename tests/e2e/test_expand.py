"""The canvas grows, and the old pixels stay as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.fakes.pictures import blob_mask, encode, scene
from tests.support.calls import Grpc, edit_inputs, pixels

SOURCE = scene(48, 64)


def edit(grpc: Grpc, mask: bytes | np.ndarray = b"", **settings: Any) -> np.ndarray:
    return pixels(grpc.edit(edit_inputs(SOURCE, mask, **settings))[0])


@pytest.mark.parametrize("margins", [(16, 0, 0, 0), (5, 7, 11, 13), (0, 0, 64, 48)])
def test_the_old_pixels_stay_and_the_new_ones_are_painted(
    grpc: Grpc, margins: tuple[int, int, int, int]
) -> None:
    left, top, right, bottom = margins
    edited = edit(grpc, expand=margins)
    assert edited.shape == (48 + top + bottom, 64 + left + right, 3)
    assert np.array_equal(edited[top : top + 48, left : left + 64], SOURCE)
    continued = np.pad(SOURCE, ((top, bottom), (left, right), (0, 0)), "edge")
    assert not np.array_equal(edited, continued)


def test_a_mask_is_edited_too(grpc: Grpc) -> None:
    mask = blob_mask(48, 64)
    edited = edit(grpc, mask, expand=(0, 0, 16, 0))[:, :64]
    assert np.array_equal(edited[mask == 0], SOURCE[mask == 0])
    assert not np.array_equal(edited[mask > 0], SOURCE[mask > 0])


def test_a_mask_that_touches_all_sides_grows_with_the_picture(grpc: Grpc) -> None:
    mask = np.full((48, 64), 255, np.uint8)
    mask[4:-4, 4:-4] = 0
    edited = edit(grpc, mask, expand=(3, 5, 7, 9))
    assert edited.shape == (48 + 14, 64 + 10, 3)
    assert np.array_equal(edited[5:53, 3:67][mask == 0], SOURCE[mask == 0])


def test_it_is_the_edit_of_the_grown_picture(grpc: Grpc) -> None:
    grown = np.pad(SOURCE, ((0, 0), (16, 0), (0, 0)), "edge")
    mask = np.zeros(grown.shape[:2], np.uint8)
    mask[:, :16] = 255
    plain = pixels(grpc.edit(edit_inputs(encode(grown), mask))[0])
    assert np.array_equal(edit(grpc, expand=(16, 0, 0, 0)), plain)


@pytest.mark.parametrize(
    ("expand", "message"),
    [
        ([1, 2, 3], "SETTINGS.expand"),
        ([-1, 0, 0, 0], "SETTINGS.expand[0]"),
        ([16_384] * 4, "SETTINGS.expand: is 32832x32816 pixels"),
    ],
)
def test_what_it_cannot_grow_to_is_refused(grpc: Grpc, expand: list[int], message: str) -> None:
    with pytest.raises(Exception, match="INVALID_REQUEST") as caught:
        edit(grpc, expand=expand)
    assert message in str(caught.value)
