"""JoyImage-Edit: pipelines, defaults, model spec of a folder, counted work."""

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
from maskserve_engine.spec.encoder_picture import EncoderPicture
from maskserve_engine.spec.family import StepPicture
from maskserve_engine.spec.latents import latent_space
from maskserve_engine.spec.model_spec import (
    SOURCE_KINDS,
    EditDefaults,
    ModelSpec,
    RefreshSpec,
    check_served,
    least_steps,
)

PIPELINES = {"JoyImageEditPipeline": REFERENCE}
"""Served semantics by the class in model_index.json."""
NAME = "JoyImage-Edit models"
SETTINGS = ()
DEFAULTS = EditDefaults(num_inference_steps=40, guidance_scale=4.0)
_STRIDE = 7
_PATCH = 2

control_work = flux.control_work
recorded_rows = mmdit.recorded_rows


def read(folder: Path, pipeline: str, native_resolution: int) -> ModelSpec:
    """Return the model spec of a JoyImage-Edit folder. Raises ConfigError if a part is unreadable
    or not served.
    """
    latents = latent_space(read_json(folder / "vae" / "config.json"))
    sampler = read_json(folder / "scheduler" / "scheduler_config.json")
    denoiser = read_json(folder / "transformer" / "config.json")
    check_served(
        ("transformer: patch_size", denoiser.get("patch_size"), [1, _PATCH, _PATCH]),
        ("transformer: rope_type", denoiser.get("rope_type"), "rope"),
        ("transformer: mlp_width_ratio", denoiser.get("mlp_width_ratio"), 4.0),
    )
    return ModelSpec(
        family="joyimage",
        semantics=PIPELINES[pipeline],
        latents=latents,
        patch=_PATCH,
        native_resolution=native_resolution or 128 * latents.pixels,
        size_multiple=latents.pixels * _PATCH,
        edit_size="area",
        guidance="cfg",
        defaults=DEFAULTS,
        stride=_STRIDE,
        dense_steps=DenseSteps(prompt=1, side=1),
        refresh=RefreshSpec(stride=0.0),
        true_cfg=False,
        denoiser=_with_names(denoiser),
        control=None,
        edit_kinds=SOURCE_KINDS,
        keeps_placed=True,
        padded_to=1,
        encoder_picture=EncoderPicture.of(folder / "processor"),
        least_steps=least_steps(sampler),
    )


def _with_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a transformer's config.json with FLUX.1's names of its sizes, too."""
    head_dim = int(config["hidden_size"]) // int(config["num_attention_heads"])
    return {**config, "attention_head_dim": head_dim, "joint_attention_dim": config["text_dim"]}


def count(config: Mapping[str, Any], picture: StepPicture) -> ModelWork:
    """Return the work of a JoyImageEditTransformer3DModel: FLUX.1's double blocks, whose shifts and
    gates come from one layer.
    """
    config = _with_names(config)
    h, inputs = mmdit.width_of(config), 4 * int(config["in_channels"])

    def stream(name: str) -> dict[str, Shape]:
        attention = {f"attn.{name}_attn_qkv": (h, 3 * h), f"attn.{name}_attn_proj": (h, h)}
        return attention | mmdit.feed_forward(f"{name}_mlp", h)

    block: Layers = {
        "token": stream("img"),
        "text": stream("txt"),
        "spare": {"attn.img_attn_kv": (h, 2 * h)},
    }
    blocks = mmdit.stack("double_blocks", int(config["num_layers"]), mmdit.BlockLayers(block))
    embedder, text = "condition_embedder", int(config["joint_attention_dim"])
    row = mmdit.embedder(f"{embedder}.time_embedder", 256, h)
    before: Layers = {
        "row": row | {f"{embedder}.time_proj": (h, 6 * h)},
        "token": {"img_in": (inputs, h)},
        "text": mmdit.embedder(f"{embedder}.text_embedder", text, h),
    }
    after: Layers = {"row": {}, "token": {"proj_out": (h, inputs)}}
    model = mmdit.TransformerLayers(blocks, before, after)
    return model.work("joyimage", config, picture)
