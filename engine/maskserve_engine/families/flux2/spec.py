"""FLUX.2 klein (4B, 9B, base models, 9B-KV) and dev: pipelines, defaults, model spec of a folder,
counted work.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maskserve_common.config_file import read_json
from maskserve_common.contracts.semantics import EXACT_REFERENCE, REFERENCE, DenseSteps
from maskserve_engine.families.flux import spec as flux
from maskserve_engine.planning.flops import ModelWork
from maskserve_engine.planning.layer_table import Layers, Shape, Shapes
from maskserve_engine.planning.regions import RegionRule
from maskserve_engine.spec import mmdit
from maskserve_engine.spec.family import StepPicture
from maskserve_engine.spec.latents import latent_space, with_statistics
from maskserve_engine.spec.model_spec import (
    ALL_KINDS,
    EditDefaults,
    Guidance,
    ModelSpec,
    RefreshSpec,
    least_steps,
)

PIPELINES = {
    "Flux2KleinInpaintPipeline": REFERENCE,
    "Flux2KleinPipeline": REFERENCE,
    "Flux2KleinKVPipeline": EXACT_REFERENCE,
    "Flux2Pipeline": REFERENCE,
}
"""Served semantics by the class in model_index.json."""
NAME = "FLUX.2 models"
SETTINGS = ()
DEFAULTS = EditDefaults(num_inference_steps=50, guidance_scale=8.0)
"""Defaults of Flux2KleinInpaintPipeline, for base models."""
_DEV = EditDefaults(num_inference_steps=50, guidance_scale=4.0)
"""Defaults of Flux2Pipeline, whose models have guidance as an input."""
_DISTILLED = EditDefaults(num_inference_steps=4, guidance_scale=0.0)
"""Steps that these models are distilled to; no pipeline's signature says so."""
_STRIDE = 7
_REFRESH_STRIDE = 0.5
"""Two refresh steps of four steps, and of 20: both meet the quality limits
(docs/decisions/refresh-steps.md); with exact references and with dev the effect has not been
measured."""
REGION = RegionRule(after=2, threshold=0.3)
"""Measured at 20 steps (docs/adr/0091)."""
_PATCH = 2
LAYERS, DEV_LAYERS = (9, 18, 27), (10, 20, 30)
"""Layers of the text encoder whose states the pipelines stack; layers after the last one are not
computed.
"""
_MOST_PICTURES = 10
"""References of the models' cards."""
_MODULATIONS = {
    "double_stream_modulation_img": 6,
    "double_stream_modulation_txt": 6,
    "single_stream_modulation": 3,
}
_KEYS = "attn.to_kv"
"""The part of `attn.to_qkv_mlp_proj` that makes keys and values. No LoRA has it by itself."""

control_work = flux.control_work
recorded_rows = mmdit.recorded_rows


def read(folder: Path, pipeline: str, native_resolution: int) -> ModelSpec:
    """Return the model spec of a FLUX.2 folder. Raises ConfigError if a part is unreadable."""
    sampler = read_json(folder / "scheduler" / "scheduler_config.json")
    vae = read_json(folder / "vae" / "config.json")
    epsilon = float(vae.get("batch_norm_eps", 1e-4))
    latents = with_statistics(latent_space(vae), folder / "vae", epsilon)
    semantics, index = PIPELINES[pipeline], read_json(folder / "model_index.json")
    denoiser = read_json(folder / "transformer" / "config.json")
    embedded = bool(denoiser.get("guidance_embeds", True))
    # The pipeline with exact references has only distilled models, and does not say so.
    distilled = semantics.exact or (not embedded and bool(index.get("is_distilled", False)))
    guidance: Guidance = "embedded" if embedded else "none" if distilled else "cfg"
    is_euler = sampler.get("_class_name") == "FlowMatchEulerDiscreteScheduler"
    return ModelSpec(
        family="flux2",
        semantics=semantics,
        latents=latents,
        patch=_PATCH,
        native_resolution=native_resolution or int(vae.get("sample_size") or 1024),
        size_multiple=latents.pixels * _PATCH,
        edit_size="cut",
        most_pictures=_MOST_PICTURES,
        guidance=guidance,
        defaults={"embedded": _DEV, "none": _DISTILLED, "cfg": DEFAULTS}[guidance],
        stride=1 if distilled else _STRIDE,
        dense_steps=DenseSteps(prompt=1, side=1),
        refresh=RefreshSpec(
            stride=0.0 if semantics.exact or embedded else _REFRESH_STRIDE,
            by_error=True,
            ring=0,
            over_template=not semantics.exact,
        ),
        region=None if semantics.exact or embedded or not is_euler else REGION,
        true_cfg=False,
        negative_prompts=False,
        mask_latents=_PATCH,
        denoiser=denoiser,
        control=None,
        edit_kinds=ALL_KINDS,
        recorded_text="text_encoder",
        text_layers=(DEV_LAYERS if embedded else LAYERS)[-1],
        keeps_placed=True,
        least_steps=least_steps(sampler),
    )


def count(config: Mapping[str, Any], picture: StepPicture) -> ModelWork:
    """Return the work of a Flux2Transformer2DModel: FLUX.1's blocks, with one set of shifts and
    gates for all blocks of a kind, and gated activations.
    """
    h = mmdit.width_of(config)
    inner = int(h * float(config.get("mlp_ratio", 3.0)))
    double: Layers = {
        "token": mmdit.attention(h, mmdit.IMAGE) | mmdit.gated_feed_forward("ff", h, inner),
        "text": mmdit.attention(h, mmdit.TEXT) | mmdit.gated_feed_forward("ff_context", h, inner),
        "spare": mmdit.attention(h, mmdit.KEYS),
    }
    joined: Shapes = {
        "attn.to_qkv_mlp_proj": (h, 3 * h + 2 * inner), "attn.to_out": (h + inner, h)
    }  # fmt: skip
    single: Layers = {"token": joined, "text": joined, "spare": {_KEYS: (h, 2 * h)}}
    blocks = mmdit.stack(
        "transformer_blocks", int(config["num_layers"]), mmdit.BlockLayers(double)
    ) | mmdit.stack(
        "single_transformer_blocks",
        int(config["num_single_layers"]),
        mmdit.BlockLayers.single(single),
    )
    time = int(config.get("timestep_guidance_channels", 256))
    row: dict[str, Shape] = {}
    for name in ("timestep", "guidance") if config.get("guidance_embeds", True) else ("timestep",):
        row |= mmdit.embedder(f"time_guidance_embed.{name}_embedder", time, h)
    for name, vectors in _MODULATIONS.items():
        row[f"{name}.linear"] = (h, vectors * h)
    before, after = {"row": row, **flux.embedders_of(config)}, mmdit.last_layers(config)
    return mmdit.TransformerLayers(blocks, before, after).work("flux2", config, picture)
