"""FLUX.1 (dev, schnell, Fill, Kontext): pipelines, defaults, model spec of a folder, counted
work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from maskserve_common.config_file import read_json
from maskserve_common.contracts.semantics import FILL, INPAINT, REFERENCE, DenseSteps
from maskserve_engine.planning.flops import ModelWork
from maskserve_engine.planning.layer_table import Layers, Shape
from maskserve_engine.spec import mmdit
from maskserve_engine.spec.family import StepPicture
from maskserve_engine.spec.mmdit import CONTROL
from maskserve_engine.spec.model_spec import (
    ALL_KINDS,
    ALL_STEPS,
    INPAINT_ONLY,
    EditDefaults,
    IpAdapterSpec,
    ModelSpec,
    RefreshSpec,
    least_steps,
    one_scale,
)

PIPELINES = {
    "FluxFillPipeline": FILL,
    "FluxInpaintPipeline": INPAINT,
    # Text-to-image pipelines are served with the inpainting semantics of their family, as
    # diffusers' own FluxInpaintPipeline.from_pretrained does.
    "FluxPipeline": INPAINT,
    "FluxImg2ImgPipeline": INPAINT,
    "FluxKontextInpaintPipeline": REFERENCE,
    "FluxKontextPipeline": REFERENCE,
}
"""Served semantics by the class in model_index.json."""
recorded_rows = mmdit.recorded_rows
NAME = "FLUX models"
SETTINGS = (
    "model.t5_weights",
    "model.t5_offload",
    "model.gguf",
    "controls.unequal_depths",
)
DEFAULTS = {
    FILL: EditDefaults(num_inference_steps=50, guidance_scale=30.0),
    INPAINT: EditDefaults(num_inference_steps=28, guidance_scale=7.0),
    REFERENCE: EditDefaults(num_inference_steps=28, guidance_scale=3.5),
}
"""Defaults of FluxFillPipeline, FluxInpaintPipeline and FluxKontextInpaintPipeline."""
_FEW_STEPS = 4
"""Steps of FLUX.1-schnell, which is distilled to so many; no pipeline's signature says so. Each has
its own anchor."""
_BLENDED = DenseSteps(prompt=1, side=1)
_DENSE_STEPS = {FILL: DenseSteps(), INPAINT: _BLENDED, REFERENCE: _BLENDED}
REFRESH_STRIDES = {FILL: 0.45, INPAINT: 0.25, REFERENCE: 0.0}
"""Strides of refresh steps; 0 where their effect has not been measured (Kontext, and distilled
models)."""
_REFRESH_GROWTH = {FILL: 1.0, INPAINT: 2.15, REFERENCE: 1.0}
"""A base model's picture round the mask changes faster the more noise there is."""
_REFRESH_RING = {FILL: 2}
"""Cached ring, by semantics. A base model's picture round the mask changes with its noise, so there
the ring is worth computing."""
_STRIDES = {FILL: ALL_STEPS, INPAINT: 7, REFERENCE: 7}
"""FLUX Fill sees the picture round the mask in extra channels, at every step. For other models it
is noised like the rest, and its activations change with the noise."""

_KINDS = {FILL: INPAINT_ONLY, INPAINT: ALL_KINDS, REFERENCE: ALL_KINDS}
_CONTROLS = {FILL: CONTROL, INPAINT: replace(CONTROL, stride=0.35), REFERENCE: None}
"""Where the picture round the mask is noised like the rest, its keys and values change less the
less noise there is."""


def blocks_of(config: Mapping[str, Any]) -> dict[str, mmdit.BlockLayers]:
    """Return the blocks of a FluxTransformer2DModel."""
    h = mmdit.width_of(config)
    keys = mmdit.attention(h, mmdit.KEYS)
    double: Layers = {
        "row": {"norm1.linear": (h, 6 * h), "norm1_context.linear": (h, 6 * h)},
        "token": mmdit.attention(h, mmdit.IMAGE) | mmdit.feed_forward("ff", h),
        "text": mmdit.attention(h, mmdit.TEXT) | mmdit.feed_forward("ff_context", h),
        "spare": keys,
    }
    joined = mmdit.attention(h, mmdit.QKV) | {"proj_mlp": (h, 4 * h), "proj_out": (5 * h, h)}
    single: Layers = {
        "row": {"norm.linear": (h, 3 * h)}, "token": joined, "text": joined, "spare": keys
    }  # fmt: skip
    counts = int(config["num_layers"]), int(config["num_single_layers"])
    return mmdit.stack("transformer_blocks", counts[0], mmdit.BlockLayers(double)) | mmdit.stack(
        "single_transformer_blocks", counts[1], mmdit.BlockLayers.single(single)
    )


def embedders_of(config: Mapping[str, Any]) -> dict[str, dict[str, Shape]]:
    """Return the layers before the blocks that embed tokens."""
    h = mmdit.width_of(config)
    return {
        "token": {"x_embedder": (int(config["in_channels"]), h)},
        "text": {"context_embedder": (int(config["joint_attention_dim"]), h)},
    }


def count(config: Mapping[str, Any], picture: StepPicture) -> ModelWork:
    """Return the work of a FluxTransformer2DModel."""
    h, blocks = mmdit.width_of(config), blocks_of(config)
    inputs = {"timestep": 256, "text": int(config["pooled_projection_dim"])}
    if config.get("guidance_embeds"):
        inputs["guidance"] = 256
    row: dict[str, Shape] = {}
    for name, width in inputs.items():
        row |= mmdit.embedder(f"time_text_embed.{name}_embedder", width, h)
    before, after = {"row": row, **embedders_of(config)}, mmdit.last_layers(config)
    return mmdit.TransformerLayers(blocks, before, after).work("flux", config, picture)


def flux_work(
    config: Mapping[str, Any], height: int, width: int, *, recorded: bool = False
) -> ModelWork:
    """Return the work of a FluxTransformer2DModel without references."""
    return count(config, StepPicture(height, width, recorded=recorded))


def control_work(config: dict[str, Any], height: int, width: int) -> ModelWork:
    """Return the work of a FluxControlNetModel beside its base, from the net's config.json and a
    size in latents.
    """
    return mmdit.control_work(flux_work(config, height, width), int(config["in_channels"]))


def read(folder: Path, pipeline: str, native_resolution: int) -> ModelSpec:
    """Return the model spec of a FLUX folder. Raises ConfigError if a part is unreadable."""
    semantics, latents = PIPELINES[pipeline], one_scale(folder)
    vae = read_json(folder / "vae" / "config.json")
    sampler = read_json(folder / "scheduler" / "scheduler_config.json")
    transformer = read_json(folder / "transformer" / "config.json")
    patch, embedded = 2, bool(transformer.get("guidance_embeds", False))
    # Base models without a guidance input are distilled to few steps.
    distilled = semantics.blends and not embedded
    semantics_defaults = DEFAULTS[semantics]
    defaults = EditDefaults(
        num_inference_steps=_FEW_STEPS if distilled else semantics_defaults.num_inference_steps,
        guidance_scale=semantics_defaults.guidance_scale if embedded else 0.0,
    )
    return ModelSpec(
        family="flux",
        semantics=semantics,
        latents=latents,
        patch=patch,
        # diffusers' Flux pipelines assume 128 latents a side unless the model says otherwise.
        native_resolution=native_resolution or int(vae.get("sample_size") or 128 * latents.pixels),
        size_multiple=latents.pixels * patch,
        edit_size="preferred" if semantics.reference else "bounded",
        guidance="embedded" if embedded else "none",
        defaults=defaults,
        stride=1 if distilled else _STRIDES[semantics],
        dense_steps=_DENSE_STEPS[semantics],
        refresh=RefreshSpec(
            stride=0.0 if distilled else REFRESH_STRIDES[semantics],
            growth=_REFRESH_GROWTH[semantics],
            second_order=semantics == INPAINT,
            over_template=semantics.blends and not distilled,
            ring=_REFRESH_RING.get(semantics),
        ),
        corrects_residuals=semantics.masked_picture,
        true_cfg=semantics.blends,
        denoiser=transformer,
        control=_CONTROLS[semantics],
        ip_adapters=None if semantics.masked_picture else _ip_adapters(transformer),
        edit_kinds=_KINDS[semantics],
        elastic=not semantics.reference,
        keeps_placed=True,
        t5=True,
        recorded_text="text_encoder_2",
        least_steps=least_steps(sampler),
    )


def _ip_adapters(config: Mapping[str, Any]) -> IpAdapterSpec:
    """Return the IP-Adapters of a FluxTransformer2DModel, whose double blocks read the picture."""
    layers = tuple((number, mmdit.width_of(config)) for number in range(int(config["num_layers"])))
    return IpAdapterSpec("xlabs", int(config["joint_attention_dim"]), layers)
