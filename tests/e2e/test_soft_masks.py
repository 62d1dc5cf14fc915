"""Grey masks: how much a part of the picture may change."""

from __future__ import annotations

import numpy as np
import pytest

from tests.fakes.pictures import scene
from tests.support.calls import Grpc, edit_inputs, pixels

SOURCE = scene(64, 64)


def edit(grpc: Grpc, mask: np.ndarray, mode: str = "strength") -> np.ndarray:
    settings = {"num_inference_steps": 8, "guidance_scale": 3.5, "mask_mode": mode}
    return pixels(grpc.edit(edit_inputs(SOURCE, mask, **settings))[0]).astype(int)


def test_grey_is_edited_for_its_share_of_the_steps(grpc: Grpc) -> None:
    mask = np.zeros((64, 64), np.uint8)
    mask[16:48, 16:48] = 255
    white = edit(grpc, mask)
    assert np.array_equal(white, edit(grpc, mask, "white"))
    five_steps, also_five_steps, two_steps = (
        edit(grpc, mask // 255 * np.uint8(grey)) for grey in (160, 190, 64)
    )
    assert np.array_equal(five_steps, also_five_steps)  # both for the last five of eight steps
    for edited in (five_steps, two_steps):
        assert np.array_equal(edited[mask == 0], SOURCE[mask == 0])
        assert not np.array_equal(edited[mask > 0], SOURCE[mask > 0])
        assert not np.array_equal(edited, white)
    assert not np.array_equal(five_steps, two_steps)


def test_a_grown_mask_has_no_grey(grpc: Grpc) -> None:
    inputs = edit_inputs(
        SOURCE, np.full((64, 64), 9, np.uint8), mask_mode="strength", mask_feather=2
    )
    with pytest.raises(
        Exception, match=r"\[INVALID_REQUEST\] SETTINGS.mask_feather: is given with"
    ):
        grpc.edit(inputs)
