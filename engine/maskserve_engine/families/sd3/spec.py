"""Stable Diffusion 3.5 (medium, large): pipelines, defaults, model spec of a folder, counted
work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from maskserve_common.config_file import read_json
from maskserve_common.contracts.dense_steps import DenseSteps
from maskserve_common.contracts.semantics import INPAINT
from maskserve_engine.families.flux import spec as flux
from maskserve_engine.planning.flops import ModelWork
from maskserve_engine.spec.model_spec import (
    EditDefaults,
    ModelSpec,
    check_served,
    least_steps,
    no_recorded_rows,
    one_scale,
)

PIPELINES = {
    "StableDiffusion3InpaintPipeline": INPAINT,
    "StableDiffusion3Img2ImgPipeline": INPAINT,
    "StableDiffusion3Pipeline": INPAINT,
}
"""Served semantics by the class in model_index.json."""
NAME = "Stable Diffusion 3.5 models"
SETTINGS = ("model.t5_weights", "model.t5_offload")
DEFAULTS = EditDefaults(num_inference_steps=50, guidance_scale=7.0)
"""Defaults of StableDiffusion3InpaintPipeline."""
_STRIDE = 7
_PATCH = 2
_CLIP = 77
"""Tokens of the CLIPs, which precede the T5's."""
_SECOND = "dual_attention_layers"

lora_work = flux.lora_work
control_work = flux.control_work
recorded_rows = no_recorded_rows


def read(folder: Path, pipeline: str, native_resolution: int) -> ModelSpec:
    """Return the model spec of a Stable Diffusion 3.5 folder.

    Raises:
        ConfigError: a part is unreadable or not served.
    """
    latents = one_scale(folder)
    sampler = read_json(folder / "scheduler" / "scheduler_config.json")
    transformer = read_json(folder / "transformer" / "config.json")
    check_served(
        ("transformer: qk_norm", transformer.get("qk_norm"), "rms_norm"),
        ("transformer: in_channels", transformer.get("in_channels"), latents.channels),
        ("transformer: patch_size", transformer.get("patch_size"), _PATCH),
        ("scheduler: use_dynamic_shifting", sampler.get("use_dynamic_shifting", False), False),
    )
    return ModelSpec(
        family="sd3",
        semantics=PIPELINES[pipeline],
        latents=latents,
        patch=_PATCH,
        native_resolution=native_resolution or 128 * latents.pixels,
        size_multiple=latents.pixels * _PATCH,
        guidance="cfg",
        defaults=DEFAULTS,
        stride=_STRIDE,
        dense_steps=DenseSteps(prompt=1, side=1),
        refresh_stride=None if transformer.get(_SECOND) else 0.0,
        true_cfg=False,
        denoiser=as_flux(transformer),
        control=None,
        keeps_placed=True,
        padded_to=1,
        caches=not transformer.get(_SECOND),
        t5=True,
        text_besides=_CLIP,
        least_steps=least_steps(sampler),
    )


def as_flux(transformer: Mapping[str, Any]) -> dict[str, Any]:
    channels = int(transformer["in_channels"]) * _PATCH**2
    return {**transformer, "in_channels": channels, "out_channels": channels, "patch_size": 1,
            "num_single_layers": 0}  # fmt: skip


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
    """Return the work of FLUX.1's double blocks, some with a second attention of the picture, which
    is counted as if it saw the text. The last block drops its text.
    """
    base = flux.count(
        config, height, width, halo, recorded=recorded, references=references, exact=exact
    )
    h, second = base.blocks[0].width, set(config.get(_SECOND) or ())
    blocks = [
        replace(
            block,
            row=block.row + 6.0 * h * h,
            token=block.token + 8.0 * h * h,
            pair=2 * block.pair,
        )
        if number in second
        else block
        for number, block in enumerate(base.blocks)
    ]
    last = blocks[-1]
    blocks[-1] = replace(last, row=last.row - 8.0 * h * h, text=6.0 * h * h)
    return replace(base, family="sd3", blocks=tuple(blocks))


def lora_layers(config: Mapping[str, Any]) -> dict[str, int]:
    """Return FLUX.1's elements per rank, with second attentions and without the text outputs of the
    last block.
    """
    h = int(config["num_attention_heads"]) * int(config["attention_head_dim"])
    last = f"transformer_blocks.{int(config['num_layers']) - 1}."
    absent_layers = tuple(last + name for name in ("attn.to_add_out", "ff_context"))
    second = {
        f"transformer_blocks.{number}.attn2.{layer}": 2 * h
        for number in config.get(_SECOND) or ()
        for layer in ("to_q", "to_k", "to_v", "to_out.0")
    }
    return second | {
        name: numbers
        for name, numbers in flux.lora_layers(config).items()
        if not name.startswith(absent_layers)
    }
