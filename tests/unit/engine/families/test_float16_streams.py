"""In float16 a block's residuals are clipped: what overflows is no hole in the picture.

Each model's feed-forward parts and attention are made so large that float16 does not hold what they
add. The oracle is the same model in float32, whose norms make it small again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maskserve_engine.families.registry import load_adapter, load_encoder
from tests.fakes.jobs import config_of, encode_case, random_case
from tests.fakes.tiny_families import DENSE, FAMILIES

FLOWS = ("flux-fill", "klein", "chroma", "sd3-large", "sd3-medium", "qwen-image", "qwen-image-21",
         "z-image")  # fmt: skip
HUGE = 3e4
"""The largest weight of the layers that end a branch."""
LAST = ("ff.net.2", "ff_context.net.2", "ff.linear_out", "ff_context.linear_out", "attn.to_out.0",
        "attn2.to_out.0", "img_mlp.net.2", "txt_mlp.net.2", "proj_out", "attention.to_out.0",
        "feed_forward.w2", "to_out", "img_mlp.w2", "mlp.down_proj", "attn.to_add_out")  # fmt: skip
"""Ends of the names of layers whose answers are added to a stream."""


def enlarge(model: Any) -> int:
    """Multiply the layers of a model's blocks that end a branch; how many they are."""
    count = 0
    with torch.no_grad():
        for name, layer in model.named_modules():
            if name.endswith(LAST) and "." in name and isinstance(layer, torch.nn.Linear):
                layer.weight *= HUGE / layer.weight.abs().max()
                count += 1
    return count


@pytest.mark.parametrize("family", FLOWS)
def test_what_float16_does_not_hold_leaves_latents_finite(family: str, tmp_path: Path) -> None:
    import diffusers

    folder = FAMILIES[family](tmp_path / family)
    part: Any = diffusers.AutoModel.from_pretrained(str(folder), subfolder="transformer")
    assert enlarge(part)
    part.save_pretrained(folder / "transformer")
    cache = {"enabled": family not in DENSE}
    config = config_of(folder, cache=cache)
    encoder = load_encoder(config)
    case = random_case(np.random.default_rng(3), num_inference_steps=2, strength=1.0)
    rows = {}
    for dtype in ("float32", "float16"):
        adapter: Any = load_adapter(config_of(folder, model={"dtype": dtype}, cache=cache))
        row = adapter.dense_row(encode_case(encoder, case, dtype))
        while row.step < row.steps:
            adapter.step([row], None)
        rows[dtype] = row.result().array()
    assert np.isfinite(rows["float32"]).all()
    assert np.isfinite(rows["float16"]).all()
