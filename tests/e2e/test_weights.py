"""The demo model with its weights in each form that a CPU runs, through a real Triton."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_common.contracts.settings import EditSettings
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor
from tests.fakes.gguf_file import write_gguf
from tests.fakes.pictures import blob_mask, scene
from tests.fakes.pipelines import diffusers_edit
from tests.support.calls import Grpc, Pixels, edit_inputs, pixels

DEMO = CHECKOUT / "assets" / "models" / "demo"
PROMPT, STEPS, SEED, SIDE = "a red star", 4, 7, 128
SOURCE, MASK = scene(SIDE, SIDE), blob_mask(SIDE, SIDE)
# A level of 255 is what rounding takes. Where tokens are rounded to 8 bits, too, a difference of
# 1e-6 before a layer may be a step of theirs.
APART = {"int8": 1, "fp8": 1, "nf4": 1, "gguf": 1, "int8-dynamic": 40}


@contextmanager
def serving(form: str, folder: Path) -> Iterator[Grpc]:
    weight_settings: dict[str, Any] = {"weights": form}
    if form == "gguf":
        weight_settings = {"gguf": str(write_gguf(DEMO, folder / "demo.gguf"))}
    options = ServeOptions(
        model=str(DEMO),
        **weight_settings,
        base_port=free_base_port(),
        log_dir=folder,
        report=lambda _: None,
    )
    with Supervisor(options) as running, closing(Grpc(running.workers[0].grpc_url)) as grpc:
        yield grpc


def of_diffusers(form: str, folder: Path) -> Pixels:
    """The edit by diffusers' own pipeline, whose layers the library has quantised."""
    from diffusers import FluxFillPipeline, FluxTransformer2DModel, GGUFQuantizationConfig
    from torch import device, float32

    from maskserve_engine.stages.quantise import quantise

    pipeline: Any = FluxFillPipeline.from_pretrained(DEMO)
    pipeline.set_progress_bar_config(disable=True)
    if form == "gguf":
        pipeline.transformer = FluxTransformer2DModel.from_single_file(
            str(folder / "demo.gguf"),
            config=str(DEMO),
            subfolder="transformer",
            quantization_config=GGUFQuantizationConfig(compute_dtype=float32),
            torch_dtype=float32,
        )
    else:
        quantise(pipeline.transformer, form, device("cpu"))
    settings = EditSettings(num_inference_steps=STEPS, guidance_scale=1.0)
    args = SOURCE, MASK, PROMPT, settings, SEED
    return np.asarray(diffusers_edit(pipeline, *args, max_sequence_length=16)[0])


@pytest.mark.slow  # tests/unit/engine/stages/test_quantise.py holds the forms in a process
@pytest.mark.parametrize("form", APART)
def test_dense_edits_are_the_pipelines_and_cached_ones_hit(form: str, tmp_path: Path) -> None:
    pytest.importorskip({"nf4": "bitsandbytes", "gguf": "gguf"}.get(form, "torchao"))
    settings = {"num_inference_steps": STEPS, "seed": SEED}
    with serving(form, tmp_path) as grpc:
        image, meta = grpc.edit(edit_inputs(SOURCE, MASK, PROMPT, **settings))
        cached, hit = grpc.edit(edit_inputs(SOURCE, MASK, PROMPT, **settings, cache="require"))
    inside = MASK > 0
    edited, expected = pixels(image), of_diffusers(form, tmp_path)
    assert np.array_equal(edited[~inside], SOURCE[~inside])
    assert np.abs(edited[inside].astype(int) - expected[inside]).max() <= APART[form]
    assert (meta["cache"], hit["cache"]) == ("off", "hit")
    error = np.mean((pixels(cached)[inside].astype(float) - edited[inside]) ** 2)
    assert 10 * np.log10(255**2 / error) > 25.0
