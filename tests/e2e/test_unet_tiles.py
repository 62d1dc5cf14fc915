"""The demo UNet with `[cache] conv_halo` through a real Triton, its entries in files."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_benchmarks.demo_model.scenes import held_out_edits
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor
from tests.support.calls import Grpc, edit_inputs, pixels


@pytest.mark.slow  # what tiles compute is held in tests/unit
def test_cached_edits_with_tiles_repeat_themselves_near_the_dense_one(tmp_path: Path) -> None:
    (edit,) = held_out_edits(1)
    config = tmp_path / "config.toml"
    config.write_text("[model]\nnum_inference_steps = 8\n[cache]\nconv_halo = 2\n")
    options = ServeOptions(
        model=str(DEMO_MODEL.with_name("demo-unet")), base_port=free_base_port(), config=config,
        log_dir=tmp_path / "logs", entries=tmp_path / "entries",
    )  # fmt: skip

    def inputs(cache: str) -> dict[str, bytes]:
        return edit_inputs(
            edit.source, edit.mask * np.uint8(255), edit.prompt, cache=cache, seed=0,
            guidance_scale=2.5, mask_ring=1,
        )  # fmt: skip

    with Supervisor(options) as supervisor, closing(Grpc(supervisor.workers[0].grpc_url)) as grpc:
        dense, _ = grpc.edit(inputs("off"))
        image, meta = grpc.edit(inputs("require"))
        repeat_image, _ = grpc.edit(inputs("require"))
    assert image == repeat_image
    assert meta["cache"] == "hit"
    assert set(meta["kinds"]) == {"kv"}
    served, inside = pixels(image), edit.mask > 0
    assert np.array_equal(served[~inside], edit.source[~inside])
    near, source = (
        np.abs(served[inside].astype(float) - reference[inside]).mean()
        for reference in (pixels(dense), edit.source)
    )
    assert 0 < near < source / 4
