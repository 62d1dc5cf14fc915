"""A checkpoint file through a real Triton: it edits as the folder from which it was made."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor
from tests.fakes.pictures import blob_mask, scene
from tests.support.calls import Grpc, Pixels, edit_inputs, pixels

SIDE = 64


def edited(folder: Path, tiny: Path, **flags: Any) -> Pixels:
    options = ServeOptions(
        **flags,
        config=tiny / "maskserve.toml",
        base_port=free_base_port(),
        log_dir=folder,
        cache_dir=folder / "cache",
        report=lambda _: None,
    )
    inputs = edit_inputs(
        scene(SIDE, SIDE), blob_mask(SIDE, SIDE), "a red star", num_inference_steps=4, seed=7
    )
    with Supervisor(options) as running, closing(Grpc(running.workers[0].grpc_url)) as grpc:
        return pixels(grpc.edit(inputs)[0])


def test_a_checkpoint_edits_as_its_folder(tmp_path: Path) -> None:
    from tests.fakes.checkpoint_files import write_checkpoint
    from tests.fakes.tiny_families import FAMILIES

    tiny = FAMILIES["z-image"](tmp_path / "z-image")
    file = write_checkpoint("z-image", tiny, tmp_path / "z.safetensors")
    of_folder = edited(tmp_path, tiny, model=str(tiny))
    of_file = edited(tmp_path, tiny, model=str(file), base=str(tiny))
    assert np.array_equal(of_file, of_folder)
