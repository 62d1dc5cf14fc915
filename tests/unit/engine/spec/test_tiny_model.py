"""The tiny model is a model that diffusers loads and edits with, not a stand-in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maskserve_common.contracts.semantics import FILL, INPAINT
from maskserve_engine.families.specs import load_spec


@pytest.mark.parametrize("semantics", ["fill", "inpaint"])
def test_diffusers_edits_with_it(semantics: str, request: pytest.FixtureRequest) -> None:
    import torch
    from diffusers import FluxFillPipeline, FluxInpaintPipeline

    folder: Path = request.getfixturevalue(f"tiny_{semantics}")
    pipeline = {"fill": FluxFillPipeline, "inpaint": FluxInpaintPipeline}[
        semantics
    ].from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)

    def edit(prompt: str) -> np.ndarray:
        return pipeline(
            prompt=prompt,
            image=Image.new("RGB", (64, 64), (200, 10, 10)),
            mask_image=Image.new("L", (64, 64), 255),
            height=64,
            width=64,
            num_inference_steps=2,
            max_sequence_length=16,
            generator=torch.Generator().manual_seed(0),
            output_type="np",
        ).images[0]

    red = edit("a red star")
    assert red.shape == (64, 64, 3)
    assert np.isfinite(red).all()
    assert red.std() > 0.01
    assert np.array_equal(red, edit("a red star"))
    assert not np.array_equal(red, edit("a blue star"))


def test_spec_has_its_sizes(tiny_fill: Path, tiny_inpaint: Path) -> None:
    fill, inpaint = load_spec(tiny_fill), load_spec(tiny_inpaint)
    assert (fill.semantics, inpaint.semantics) == (FILL, INPAINT)
    assert fill.native_resolution == 64
    assert fill.token_pixels == 8
    assert fill.guidance == "embedded"
