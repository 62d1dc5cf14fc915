"""Large photographs are edited at their own sharpness, through a window round the mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.fakes.pictures import encode, scene
from tests.support.calls import Grpc, edit_inputs, pixels

HEIGHT, WIDTH = 700, 900
MASK = np.zeros((HEIGHT, WIDTH), np.uint8)
MASK[320:340, 500:527] = 255


def edit(grpc: Grpc, **settings: Any) -> tuple[np.ndarray, dict[str, Any]]:
    image, meta = grpc.edit(edit_inputs(SOURCE, MASK, **settings))
    return pixels(image), meta


SOURCE = scene(HEIGHT, WIDTH)


def test_a_window_is_what_a_client_would_cut_out_and_paste_back(grpc: Grpc) -> None:
    edited, meta = edit(grpc)
    left, top, right, bottom = meta["window"]["box"]
    assert meta["window"]["scale"] == 1.0
    assert left <= 500 < 527 <= right
    assert top <= 320 < 340 <= bottom
    assert np.array_equal(edited[MASK == 0], SOURCE[MASK == 0])
    part, mask = SOURCE[top:bottom, left:right], MASK[top:bottom, left:right]
    cropped_edit = pixels(grpc.edit(edit_inputs(part, mask))[0])
    assert np.array_equal(edited[top:bottom, left:right], cropped_edit)


def test_without_a_window_the_model_sees_all(grpc: Grpc) -> None:
    edited, meta = edit(grpc, crop_to_mask="off")
    assert "window" not in meta
    assert np.array_equal(edited[MASK == 0], SOURCE[MASK == 0])
    windowed, _ = edit(grpc)
    assert not np.array_equal(edited, windowed)


def test_padding_widens_it(grpc: Grpc) -> None:
    _, meta = edit(grpc, crop_padding=150, crop_to_mask="on")
    left, top, right, bottom = meta["window"]["box"]
    assert (left <= 350, top <= 170, right >= 677, bottom >= 490) == (True,) * 4
    assert meta["window"]["scale"] < 1


def test_edits_near_one_another_share_a_windows_entries(grpc: Grpc) -> None:
    """Their masks are apart by less than a cell of the grid."""
    for _ in range(2):
        grpc.edit(edit_inputs(SOURCE, MASK, cache="require", mask_ring=1))
    near = np.roll(MASK, (2, 2), (0, 1))
    _, meta = grpc.edit(edit_inputs(SOURCE, near, cache="require"))
    assert meta["cache"] == "hit"


@pytest.mark.parametrize("at", [(0, 0), (HEIGHT - 1, WIDTH - 1), (350, 0)])
def test_a_mask_of_one_pixel_at_the_edge(grpc: Grpc, at: tuple[int, int]) -> None:
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[at] = 255
    image, meta = grpc.edit(edit_inputs(encode(SOURCE), mask, num_inference_steps=1))
    assert np.array_equal(pixels(image)[mask == 0], SOURCE[mask == 0])
    assert meta["active_tokens"] < meta["total_tokens"]
