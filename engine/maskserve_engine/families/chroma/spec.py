"""Chroma: pipelines, defaults, model spec of a folder, counted work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maskserve_common.config_file import read_json
from maskserve_common.contracts.semantics import INPAINT, DenseSteps
from maskserve_engine.families.flux import spec as flux
from maskserve_engine.planning.flops import ModelWork
from maskserve_engine.planning.layer_table import Layers, Shape
from maskserve_engine.spec import mmdit
from maskserve_engine.spec.family import StepPicture
from maskserve_engine.spec.model_spec import (
    ALL_KINDS,
    EditDefaults,
    ModelSpec,
    RefreshSpec,
    least_steps,
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

control_work = flux.control_work
recorded_rows = mmdit.recorded_rows


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
        refresh=RefreshSpec(stride=0.0),
        true_cfg=False,
        denoiser=read_json(folder / "transformer" / "config.json"),
        control=None,
        edit_kinds=ALL_KINDS,
        keeps_placed=True,
        padded_to=1,
        t5=True,
        least_steps=least_steps(sampler),
    )


def count(config: Mapping[str, Any], picture: StepPicture) -> ModelWork:
    """Return FLUX.1's work, with the blocks' vectors computed once for all blocks by the
    approximator.
    """
    blocks = {
        name: block._replace(layers={**block.layers, "row": {}})
        for name, block in flux.blocks_of(config).items()
    }
    inner, embedded, layers = (
        int(config[f"approximator_{name}"]) for name in ("hidden_dim", "num_channels", "layers")
    )
    h = mmdit.width_of(config)
    shapes: dict[str, Shape] = {"in_proj": (embedded, inner), "out_proj": (inner, h)}
    for number in range(layers):
        shapes |= mmdit.embedder(f"layers.{number}", inner, inner)
    after: Layers = {"token": mmdit.last_layers(config)["token"]}
    model = mmdit.TransformerLayers(blocks, flux.embedders_of(config), after)
    row = {  # each layer runs once for each vector
        f"distilled_guidance_layer.{name}": (model.vectors * inputs, outputs)
        for name, (inputs, outputs) in shapes.items()
    }
    return model._replace(before={**model.before, "row": row}).work("chroma", config, picture)
