"""The parts of a worker in one process, against the edit without a cache."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from maskserve_benchmarks.checkout import DEMO_EDIT, DEMO_MODEL
from maskserve_benchmarks.demo_model.scenes import held_out_edits
from maskserve_benchmarks.edits.direct import Direct
from maskserve_common.config_file import config_of
from maskserve_common.imaging.images import encode_image


def test_a_cached_edit_on_a_tile_is_near_the_dense_one() -> None:
    """It primes, as a worker does, by the prompt that its encoder has left."""
    (scene,) = held_out_edits(1)
    model = {"path": str(DEMO_MODEL.with_name("demo-unet")), "torch_threads": 1}
    direct = Direct(config_of({"model": model, "cache": {"conv_halo": 2}}))
    images = encode_image(scene.source, "png"), encode_image(scene.mask * np.uint8(255), "png")
    edit_settings = {"seed": 0, "num_inference_steps": 8, "mask_ring": 1}
    try:
        answers = [
            direct.edit((*images, scene.prompt), edit_settings | {"cache": cache})
            for cache in ("off", "require", "require")
        ]
    finally:
        direct.engine.close(5.0)
    dense, cached, repeat = (np.asarray(Image.open(io.BytesIO(file))) for file in answers)
    inside = scene.mask > 0
    assert np.array_equal(cached, repeat)
    near, source = (
        np.abs(cached[inside].astype(float) - reference[inside]).mean()
        for reference in (dense, scene.source)
    )
    assert 0 < near < source / 4


def test_an_edit_without_a_mask_or_a_source_is_of_that_kind() -> None:
    (scene,) = held_out_edits(1, (96, 64))
    direct = Direct(config_of({"model": {"path": str(DEMO_EDIT), "torch_threads": 1}}))
    settings = {"seed": 0, "num_inference_steps": 2}
    try:
        files = [
            direct.edit((image, b"", scene.prompt), settings)
            for image in (b"", encode_image(scene.source, "png"))
        ]
    finally:
        direct.engine.close(5.0)
    generated, edited = (Image.open(io.BytesIO(file)) for file in files)
    assert (generated.size, edited.size) == ((128, 128), scene.source.shape[1::-1])
