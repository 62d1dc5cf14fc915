"""The demo UNet with `[cache] conv_halo` through a real Triton, its entries in files."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from maskserve_harness.checkout import DEMO_MODEL
from maskserve_harness.demo_model.scenes import held_out_edits
from maskserve_harness.quality.unet_command import Choice, Rig
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor
from tests.support.calls import Grpc, edit_inputs, pixels

MODEL = DEMO_MODEL.with_name("demo-unet")
HALO, STEPS, SEED = 2, 8, 0
"""The seed of the rig's first edit."""
CONFIG = f"""\
[model]
num_inference_steps = {STEPS}
[cache]
conv_halo = {HALO}
"""


@pytest.mark.slow  # the same without a Triton is in tests/unit
def test_a_cached_edit_with_tiles_is_what_the_family_gives_without_triton(tmp_path: Path) -> None:
    """But for the noise of the template, which the server draws from its digest. The naive rivals
    are farther: what dense rows give, and the source.
    """
    (edit,) = held_out_edits(1)
    rig = Rig(MODEL, STEPS, 0.0, HALO)
    choice = Choice("kv", "int4", 7, ring=1, halo=HALO)
    [direct] = rig.cached([edit], rig.entries([edit], stride=7, format="int4"), choice)
    [dense] = rig.dense([edit])
    config = tmp_path / "config.toml"
    config.write_text(CONFIG)
    options = ServeOptions(
        model=str(MODEL), base_port=free_base_port(), config=config,
        log_dir=tmp_path / "logs", entries=tmp_path / "entries",
    )  # fmt: skip
    with Supervisor(options) as supervisor, closing(Grpc(supervisor.workers[0].grpc_url)) as grpc:
        inputs = edit_inputs(
            edit.source, edit.mask * np.uint8(255), edit.prompt, cache="require", seed=SEED,
            num_inference_steps=STEPS, guidance_scale=rig.guidance, mask_ring=1,
        )  # fmt: skip
        image, meta = grpc.edit(inputs)
        again, _ = grpc.edit(inputs)
    assert image == again
    assert meta["cache"] == "hit"
    assert set(meta["kinds"]) == {"kv"}
    served, inside = pixels(image), edit.mask > 0
    assert np.array_equal(served[~inside], edit.source[~inside])
    near, rival, source = (
        np.abs(served[inside].astype(float) - other[inside]).mean()
        for other in (direct, dense, edit.source)
    )
    assert near < 1.5 < 3.0 < rival < source  # levels of 255
