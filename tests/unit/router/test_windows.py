"""Router and worker choose the same window of an edit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from maskserve_common.config import Config, LimitsConfig
from maskserve_common.contracts.settings import CropMode, EditSettings
from maskserve_common.contracts.status_record import Served
from maskserve_common.imaging.masks import active_tokens
from maskserve_router.scheduling.edit_cost import count_tokens
from maskserve_triton.accept import accept_edit
from maskserve_triton.preprocess import prepare_edit
from tests.fakes.model_specs import FILL_SPEC
from tests.fakes.pictures import encode, scene
from tests.support.draws import fresh_rng

NATIVE, RING = 128, 1
SERVED = Served(NATIVE, FILL_SPEC.token_pixels, 28, mask_ring=RING)
SPEC = replace(FILL_SPEC, native_resolution=NATIVE)


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_a_router_counts_the_tokens_of_the_windows_that_a_worker_prepares(mode: CropMode) -> None:
    rng = fresh_rng()
    windowed = 0
    for _ in range(20):
        height, width = (int(side) for side in rng.integers(100, 700, 2))
        mask = np.zeros((height, width), np.uint8)
        top, left = int(rng.integers(0, height - 40)), int(rng.integers(0, width - 40))
        mask[top : top + int(rng.integers(1, 200)), left : left + int(rng.integers(1, 200))] = 255
        settings = EditSettings(
            crop_to_mask=mode,
            mask_feather=int(rng.integers(0, 9)),
            mask_dilate=int(rng.integers(0, 9)),
            expand=(0, 0, int(rng.choice([0, 60])), 0),
        )
        tokens = count_tokens(encode(mask), settings, SERVED, LimitsConfig())
        prepared = prepare_edit(
            encode(scene(height, width)),
            encode(mask),
            accept_edit(settings, b"x", SPEC, Config()),
            SPEC,
            Config(),
        )
        side = SPEC.token_pixels
        assert tokens.total == prepared.edit_mask.size // side**2
        assert tokens.active >= len(active_tokens(prepared.edit_mask, side, RING))
        windowed += prepared.request.window is not None
    assert windowed
