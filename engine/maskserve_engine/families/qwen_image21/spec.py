"""Qwen-Image-2.1: pipeline, defaults, model spec of a folder, counted work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from maskserve_common.config import ConfigError
from maskserve_common.config_file import read_json
from maskserve_common.contracts.semantics import EXACT_REFERENCE, DenseSteps
from maskserve_engine.families.flux import spec as flux
from maskserve_engine.planning.flops import ModelWork
from maskserve_engine.planning.layer_table import Layers, Shapes
from maskserve_engine.spec import mmdit
from maskserve_engine.spec.encoder_picture import EncoderPicture
from maskserve_engine.spec.family import StepPicture
from maskserve_engine.spec.latents import latent_space
from maskserve_engine.spec.model_spec import (
    ALL_KINDS,
    EditDefaults,
    ModelSpec,
    RefreshSpec,
    check_served,
    least_steps,
)

PIPELINES = {"QwenImage21Pipeline": EXACT_REFERENCE}
"""Served semantics by the class in model_index.json."""
NAME = "Qwen-Image-2.1 models"
SETTINGS = ()
DEFAULTS = EditDefaults(num_inference_steps=40, guidance_scale=0.0)
"""Defaults of QwenImage21Pipeline, which guides if an edit has a negative prompt."""
_STRIDE = 7
"""Anchor stride; each of a distilled model's few steps has its own anchor."""
_PATCH = 2
_MOST_PICTURES = 10
"""Its pipeline names no number."""

control_work = flux.control_work
recorded_rows = mmdit.recorded_rows


def read(folder: Path, pipeline: str, native_resolution: int) -> ModelSpec:
    """Return the model spec of a Qwen-Image-2.1 folder.

    Raises:
        ConfigError: a part is unreadable or not served.
    """
    sampler = read_json(folder / "scheduler" / "scheduler_config.json")
    transformer = read_json(folder / "transformer" / "config.json")
    vae, index = read_json(folder / "vae" / "config.json"), read_json(folder / "model_index.json")
    latents, least = latent_space(vae), least_steps(sampler)
    sigmas = _listed_sigmas(index.get("sample_sigmas"), least)
    check_served(
        ("transformer: causal_condition", transformer.get("causal_condition", True), True),
        ("transformer: patch_size", transformer.get("patch_size", 1), 1),
        ("vae: patch_size", vae.get("patch_size"), None),
    )
    return ModelSpec(
        family="qwen_image21",
        semantics=PIPELINES[pipeline],
        latents=latents,
        patch=_PATCH,
        native_resolution=native_resolution or 128 * latents.pixels,
        # The text encoder has a slot for each two tokens a side.
        size_multiple=latents.pixels * _PATCH * 2,
        edit_size="area",
        most_pictures=_MOST_PICTURES,
        reference_size="area",
        guidance="none",
        defaults=replace(DEFAULTS, num_inference_steps=len(sigmas)) if sigmas else DEFAULTS,
        stride=1 if sigmas else _STRIDE,
        dense_steps=DenseSteps(prompt=1, side=1),
        refresh=RefreshSpec(
            stride=0.0,
            leaves_text=False,
        ),
        true_cfg=True,
        denoiser=as_flux(transformer),
        control=None,
        edit_kinds=ALL_KINDS,
        keeps_placed=True,
        padded_to=1,
        mask_latents=_PATCH,
        encoder_picture=EncoderPicture(latents.pixels * _PATCH * 2, 0, 0, replaced=True),
        least_steps=least,
        sigmas=sigmas,
    )


def _listed_sigmas(value: Any, least: int) -> tuple[float, ...]:
    """Return `ModelSpec.sigmas` from a pipeline's `sample_sigmas`."""
    if value is None:
        return ()
    numbers = value if isinstance(value, list) else []
    try:
        falls = all(a > b for a, b in pairwise([math.nextafter(1.0, 2.0), *numbers, 0.0]))
    except TypeError:
        falls = False
    if not falls or len(numbers) < least:
        raise ConfigError(
            f"[model] path: model_index.json: sample_sigmas: {value} is no schedule; "
            f"use {least} or more numbers that fall from at most 1 to above 0"
        )
    return tuple(map(float, numbers))


def as_flux(transformer: Mapping[str, Any]) -> dict[str, Any]:
    return {**transformer, "joint_attention_dim": int(transformer["context_in_dim"])}


def count(config: Mapping[str, Any], picture: StepPicture) -> ModelWork:
    """Return the work of a QwenImage21Transformer2DModel for the picture only: gated activations,
    one set of scales and gates for all blocks, and prompts whose keys and values are computed once.
    """
    h = mmdit.width_of(config)
    inner = int(h * float(config.get("mlp_ratio", 3)))
    mlp: Shapes = {"proj": (h, inner), "gate_layer": (h, inner), "out": (inner, h)}
    layers: Layers = {
        "token": {
            **mmdit.attention(h, mmdit.IMAGE),
            **{f"img_mlp.{name}": shape for name, shape in mlp.items()},
        },
        "spare": mmdit.attention(h, mmdit.KEYS),
    }
    blocks = mmdit.stack("transformer_blocks", int(config["num_layers"]), mmdit.BlockLayers(layers))
    row = mmdit.embedder("time_text_embed.timestep_embedder", 256, h)
    before: Layers = {
        "row": {**row, "modulation.1": (h, 4 * h)},
        "token": {"img_in": (int(config["in_channels"]), h)},
    }
    after: Layers = {**mmdit.last_layers(config), "row": {"norm_out.linear": (h, h)}}
    work = mmdit.TransformerLayers(blocks, before, after).work("qwen_image21", config, picture)
    return replace(work, computes_text_once=True, peak_text=2.0 * h * len(blocks))
