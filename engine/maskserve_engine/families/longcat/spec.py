"""LongCat-Image and LongCat-Image-Edit: pipelines, defaults, model spec of a folder, counted
work.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maskserve_common.config_file import read_json
from maskserve_common.contracts.semantics import INPAINT, REFERENCE, DenseSteps
from maskserve_engine.families.flux import spec as flux
from maskserve_engine.planning.flops import ModelWork
from maskserve_engine.planning.layer_table import Layers
from maskserve_engine.spec import mmdit
from maskserve_engine.spec.encoder_picture import EncoderPicture
from maskserve_engine.spec.family import StepPicture
from maskserve_engine.spec.model_spec import (
    ALL_KINDS,
    SOURCE_KINDS,
    EditDefaults,
    ModelSpec,
    RefreshSpec,
    least_steps,
    one_scale,
)

PIPELINES = {"LongCatImagePipeline": INPAINT, "LongCatImageEditPipeline": REFERENCE}
"""Served semantics by the class in model_index.json."""
NAME = "LongCat-Image models"
SETTINGS = ()
DEFAULTS = EditDefaults(num_inference_steps=50, guidance_scale=4.5)
_STRIDE = 7
_PATCH = 2

control_work = flux.control_work
recorded_rows = mmdit.recorded_rows


def read(folder: Path, pipeline: str, native_resolution: int) -> ModelSpec:
    """Return the model spec of a LongCat-Image folder. Raises ConfigError if a part is
    unreadable.
    """
    latents, semantics = one_scale(folder), PIPELINES[pipeline]
    sampler = read_json(folder / "scheduler" / "scheduler_config.json")
    edits, picture = semantics.reference, None
    if edits:
        picture = EncoderPicture.of(folder / "text_processor", divisor=2)
    return ModelSpec(
        family="longcat",
        semantics=semantics,
        latents=latents,
        patch=_PATCH,
        native_resolution=native_resolution or 128 * latents.pixels,
        size_multiple=latents.pixels * _PATCH,
        edit_size="covering" if edits else "bounded",
        guidance="cfg",
        defaults=DEFAULTS,
        stride=_STRIDE,
        dense_steps=DenseSteps(prompt=1, side=1),
        refresh=RefreshSpec(stride=0.0),
        true_cfg=False,
        denoiser=read_json(folder / "transformer" / "config.json"),
        control=None,
        edit_kinds=SOURCE_KINDS if edits else ALL_KINDS,
        keeps_placed=True,
        text_besides=2 * edits,  # marks round the source
        encoder_picture=picture,
        least_steps=least_steps(sampler),
    )


def count(config: Mapping[str, Any], picture: StepPicture) -> ModelWork:
    """Return the work of a LongCatImageTransformer2DModel: FLUX.1's, without a pooled prompt."""
    row = mmdit.embedder("time_embed.timestep_embedder", 256, mmdit.width_of(config))
    before: Layers = {"row": row, **flux.embedders_of(config)}
    model = mmdit.TransformerLayers(flux.blocks_of(config), before, mmdit.last_layers(config))
    return model.work("longcat", config, picture)
