"""Chroma: pipelines, defaults, model spec of a folder, counted work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from maskserve_common.config_file import read_json
from maskserve_common.contracts.dense_steps import DenseSteps
from maskserve_common.contracts.semantics import INPAINT
from maskserve_engine.families.flux import spec as flux
from maskserve_engine.planning.flops import FixedWork, ModelWork
from maskserve_engine.spec.model_spec import (
    EditDefaults,
    ModelSpec,
    least_steps,
    no_recorded_rows,
    one_scale,
)

PIPELINES = {
    "ChromaInpaintPipeline": INPAINT,
    "ChromaImg2ImgPipeline": INPAINT,
    "ChromaPipeline": INPAINT,
}
"""Served semantics by the class in model_index.json."""
NAME = "Chroma models"
SETTINGS = ("model.t5_weights", "model.t5_offload")
DEFAULTS = EditDefaults(num_inference_steps=28, guidance_scale=7.0)
_STRIDE = 7
_PATCH = 2

lora_work = flux.lora_work
lora_layers = flux.lora_layers
control_work = flux.control_work
recorded_rows = no_recorded_rows


def read(folder: Path, pipeline: str, native_resolution: int) -> ModelSpec:
    """Return the model spec of a Chroma folder. Raises ConfigError if a part is unreadable."""
    latents = one_scale(folder)
    sampler = read_json(folder / "scheduler" / "scheduler_config.json")
    return ModelSpec(
        family="chroma",
        semantics=PIPELINES[pipeline],
        latents=latents,
        patch=_PATCH,
        native_resolution=native_resolution or 128 * latents.pixels,
        size_multiple=latents.pixels * _PATCH,
        guidance="cfg",
        defaults=DEFAULTS,
        stride=_STRIDE,
        dense_steps=DenseSteps(prompt=1, side=1),
        refresh_stride=0.0,
        true_cfg=False,
        denoiser=read_json(folder / "transformer" / "config.json"),
        control=None,
        keeps_placed=True,
        padded_to=1,
        t5=True,
        least_steps=least_steps(sampler),
    )


def count(
    config: dict[str, Any],
    height: int,
    width: int,
    halo: int,
    *,
    recorded: bool,
    references: int,
    exact: bool = False,
) -> ModelWork:
    """Return FLUX.1's work, with the blocks' vectors computed once for all blocks by the
    approximator.
    """
    alike = {**config, "pooled_projection_dim": 0, "guidance_embeds": False}
    base = flux.count(
        alike, height, width, halo, recorded=recorded, references=references, exact=exact
    )
    inner, embedded_width = (
        float(config[f"approximator_{name}"]) for name in ("hidden_dim", "num_channels")
    )
    vectors = 12 * int(config["num_layers"]) + 3 * int(config["num_single_layers"]) + 2
    layers = 2 * int(config["approximator_layers"]) * inner
    row = 2.0 * vectors * inner * (embedded_width + layers + base.blocks[0].width)
    [embed] = base.before
    return replace(
        base,
        family="chroma",
        blocks=tuple(replace(block, row=0.0) for block in base.blocks),
        before=(replace(embed, row=row),),
        after=FixedWork(token=base.after.token, launches=base.after.launches),
    )
