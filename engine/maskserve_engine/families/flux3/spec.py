"""FLUX.3 klein and its base model: pipelines, defaults, model spec of a folder, counted work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maskserve_common.config_file import read_json
from maskserve_common.contracts.semantics import REFERENCE, DenseSteps
from maskserve_engine.families.flux import spec as flux
from maskserve_engine.planning.flops import ModelWork
from maskserve_engine.planning.layer_table import Layers, Shape
from maskserve_engine.spec import mmdit
from maskserve_engine.spec.family import StepPicture
from maskserve_engine.spec.latents import latent_space, with_statistics
from maskserve_engine.spec.model_spec import (
    ALL_KINDS,
    EditDefaults,
    ModelSpec,
    RefreshSpec,
    check_served,
)

_DISTILLED = "Flux3DistilledModularPipeline"
PIPELINES = {_DISTILLED: REFERENCE, "Flux3ModularPipeline": REFERENCE}
"""Served semantics by the class in modular_model_index.json."""
NAME = "FLUX.3 models"
SETTINGS = ()
DEFAULTS = EditDefaults(num_inference_steps=50, guidance_scale=3.5)
_OF_DISTILLED = EditDefaults(num_inference_steps=16, guidance_scale=0.0)
_STRIDE, _OF_DISTILLED_STRIDE = 7, 2
_PATCH = 2
_MOST_PICTURES = 10
"""References as of FLUX.2 klein; its pipeline names no number."""

control_work = flux.control_work
recorded_rows = mmdit.recorded_rows


def read(folder: Path, pipeline: str, native_resolution: int) -> ModelSpec:
    """Return the model spec of a FLUX.3 folder.

    Raises:
        ConfigError: a part is unreadable or not served.
    """
    transformer = read_json(folder / "transformer" / "config.json")
    vae, distilled = read_json(folder / "vae" / "config.json"), pipeline == _DISTILLED
    check_served(("transformer: flow_map", transformer.get("flow_map", False), distilled))
    epsilon = float(vae.get("batch_norm_eps", 1e-4))
    latents = with_statistics(latent_space(vae), folder / "vae", epsilon)
    return ModelSpec(
        family="flux3",
        semantics=PIPELINES[pipeline],
        latents=latents,
        patch=_PATCH,
        native_resolution=native_resolution or int(vae.get("sample_size") or 1024),
        size_multiple=latents.pixels * _PATCH,
        edit_size="padded",
        most_pictures=_MOST_PICTURES,
        guidance="none" if distilled else "cfg",
        defaults=_OF_DISTILLED if distilled else DEFAULTS,
        stride=_OF_DISTILLED_STRIDE if distilled else _STRIDE,
        dense_steps=DenseSteps(prompt=1, side=1),
        # No token of its first blocks sees the text.
        refresh=RefreshSpec(stride=0.0, leaves_text=False),
        true_cfg=False,
        mask_latents=_PATCH,
        denoiser=transformer,
        control=None,
        edit_kinds=ALL_KINDS,
        keeps_placed=True,
        padded_to=1,
    )


def count(config: Mapping[str, Any], picture: StepPicture) -> ModelWork:
    """Return the work of a Flux3Transformer2DModel. Layers of the context's mode count as those of
    the image's. In blocks of a mode, attention is counted as if it saw all tokens.
    """
    h, number = mmdit.width_of(config), int(config["num_layers"])
    inner = int(h * float(config.get("mlp_ratio", 3.0)))
    token = mmdit.attention(h, mmdit.IMAGE) | mmdit.gated_feed_forward("ff", h, inner)
    image: Layers = {"token": token, "spare": mmdit.attention(h, mmdit.KEYS)}
    blocks = mmdit.stack(
        "mode_blocks.image", number, mmdit.BlockLayers.single(image)
    ) | mmdit.stack(
        "single_transformer_blocks",
        int(config["num_single_layers"]),
        mmdit.BlockLayers.single({**image, "text": token}),
    )
    row: dict[str, Shape] = {
        f"{part}_stream_modulations.{mode}.linear": (h, 3 * h)
        for part in ("early", "single")
        for mode in ("image", "image_cond", "txt")
    }
    for time in ("timestep", "target_timestep")[: 1 + bool(config.get("flow_map"))]:
        row |= mmdit.embedder(f"{time}_embedder", int(config.get("timestep_channels", 256)), h)
    text = {
        f"txt_mode_blocks.{block}.{name}": shape
        for block in range(number)
        for name, shape in token.items()
    }
    before: Layers = {
        "row": row,
        "token": {"x_embedders.image": (int(config["in_channels"]), h)},
        "text": {"context_embedder": (int(config["joint_attention_dim"]), h), **text},
    }
    model = mmdit.TransformerLayers(blocks, before, mmdit.last_layers(config))
    return model.work("flux3", config, picture)
