"""Z-Image (base, Turbo): pipelines, defaults, model spec of a folder, counted work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from maskserve_common.config import ConfigError
from maskserve_common.config_file import read_json
from maskserve_common.contracts.dense_steps import DenseSteps
from maskserve_common.contracts.semantics import INPAINT
from maskserve_engine.families.flux import spec as flux
from maskserve_engine.planning.flops import ModelWork
from maskserve_engine.spec import mmdit
from maskserve_engine.spec.model_spec import (
    EditDefaults,
    ModelSpec,
    least_steps,
    no_recorded_rows,
    one_scale,
)

PIPELINES = {
    "ZImageInpaintPipeline": INPAINT,
    "ZImageImg2ImgPipeline": INPAINT,
    "ZImagePipeline": INPAINT,
}
"""Served semantics by the class in model_index.json."""
NAME = "Z-Image models"
SETTINGS = ()
DEFAULTS = EditDefaults(num_inference_steps=50, guidance_scale=5.0)
_TURBO = EditDefaults(num_inference_steps=8, guidance_scale=0.0)
"""The publisher's settings for the distilled model, which its pipeline's class does not
identify."""
_TURBO_SHIFT = 3.0
"""Shift of its schedule, which identifies it."""
_STRIDE = 7
_PATCH = 2
PADDED_TO = 32
"""Prompt and picture are each padded to a multiple of this number of tokens."""
_TIME, _TIME_WIDTH = 256, 1024

_LAUNCHES, _LAUNCHES_OUTSIDE = (16.8, 26.8, 20.8), 14.6
"""Kernels of a block and outside, counted on a device without memory."""

control_work = flux.control_work
recorded_rows = no_recorded_rows


def pads_of(tokens: int) -> int:
    return -tokens % PADDED_TO


def read(folder: Path, pipeline: str, native_resolution: int) -> ModelSpec:
    """Return the model spec of a Z-Image folder.

    Raises:
        ConfigError: a part is unreadable or not served.
    """
    latents = one_scale(folder)
    sampler = read_json(folder / "scheduler" / "scheduler_config.json")
    transformer = read_json(folder / "transformer" / "config.json")
    if transformer.get("siglip_feat_dim") is not None:
        raise ConfigError(
            "[model] path: siglip_feat_dim: Z-Image with SigLIP features is not served; "
            "use a model without"
        )
    if list(transformer.get("all_patch_size", [_PATCH])) != [_PATCH]:
        raise ConfigError(
            f"[model] path: all_patch_size: {transformer['all_patch_size']} is not served; "
            f"served: [{_PATCH}]"
        )
    turbo = sampler.get("shift") == _TURBO_SHIFT and not sampler.get("use_dynamic_shifting")
    return ModelSpec(
        family="z_image",
        semantics=PIPELINES[pipeline],
        latents=latents,
        patch=_PATCH,
        native_resolution=native_resolution or 128 * latents.pixels,
        size_multiple=latents.pixels * _PATCH,
        guidance="cfg",
        guides_above=0.0,
        defaults=_TURBO if turbo else DEFAULTS,
        stride=1 if turbo else _STRIDE,
        dense_steps=DenseSteps(prompt=1, side=1),
        refresh_stride=0.0,
        leaves_text=False,  # its first blocks do not see the text
        true_cfg=False,
        denoiser=as_flux(transformer),
        control=None,
        keeps_placed=True,
        padded_to=PADDED_TO,
        least_steps=least_steps(sampler),
    )


def as_flux(transformer: Mapping[str, Any]) -> dict[str, Any]:
    width, heads = int(transformer["dim"]), int(transformer["n_heads"])
    blocks = int(transformer["n_layers"]) + int(transformer["n_refiner_layers"])
    return {
        **transformer,
        "num_attention_heads": heads,
        "attention_head_dim": width // heads,
        "joint_attention_dim": int(transformer["cap_feat_dim"]),
        "num_layers": 0,
        "num_single_layers": blocks,
    }


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
    """Return the work of FLUX.1's single blocks, with other feed-forward layers, and vectors from a
    small embedding. The first blocks do not see the text; attention counts it nevertheless.
    """
    channels = int(config["in_channels"]) * _PATCH**2
    alike = {"in_channels": channels, "pooled_projection_dim": 0, "guidance_embeds": False}
    base = flux.count(
        {**config, **alike},
        height,
        width,
        halo,
        recorded=recorded,
        references=references,
        exact=exact,
    )
    h = base.blocks[0].width
    small, token = float(min(h, _TIME)), 8.0 * h * h + 6.0 * h * int(h / 3 * 8)
    image_only_count = int(config["n_refiner_layers"])
    blocks = [
        replace(
            block,
            row=8.0 * small * h,
            token=token,
            text=0.0 if number < image_only_count else token,
            launches=_LAUNCHES,
        )
        for number, block in enumerate(base.blocks)
    ]
    [embed] = base.before
    time = 2.0 * _TIME_WIDTH * (_TIME + small)
    return replace(
        base,
        family="z_image",
        blocks=tuple(blocks),
        before=(replace(embed, row=time, text=0.0),),  # a prompt is embedded once
        after=replace(base.after, row=2.0 * small * h, launches=_LAUNCHES_OUTSIDE),
    )


_FLUX_NAMES = {
    "all_x_embedder": "x_embedder",
    "all_final_layer": "proj_out",
    "cap_embedder": "context_embedder",
    "context_refiner": "context_embedder",
}


def lora_work(base: ModelWork, layers: Mapping[str, int]) -> ModelWork:
    """Return the work that a LoRA adds. `layers` are the elements of its factors, by dotted layer
    name in ZImageTransformer2DModel.
    """
    image_only_count = sum(not block.text for block in base.blocks)
    named: Counter[str] = Counter()
    for name, numbers in layers.items():
        stack, _, layer_path = name.partition(".")
        block, _, layer = layer_path.partition(".")
        if stack in ("noise_refiner", "layers"):
            number = int(block) + image_only_count * (stack == "layers")
            flux_layer = layer.replace("attention", "attn").replace(
                "adaLN_modulation.0", "norm.linear"
            )
            named[f"single_transformer_blocks.{number}.{flux_layer}"] += numbers
        else:
            named[_FLUX_NAMES.get(stack, stack)] += numbers
    added = flux.lora_work(base, named)
    blocks = [
        replace(block, text=block.text if of_base.text else 0.0)
        for block, of_base in zip(added.blocks, base.blocks, strict=True)
    ]
    return replace(added, blocks=tuple(blocks))


def lora_layers(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the elements per rank of a LoRA on every linear layer of the blocks except modulation,
    for `lora_work`.
    """
    h = int(config["dim"])
    inner = int(h / 3 * 8)
    block = {f"attention.{layer}": 2 * h for layer in ("to_q", "to_k", "to_v", "to_out.0")}
    block |= {f"feed_forward.w{number}": h + inner for number in (1, 2, 3)}
    stacks = {"noise_refiner": "n_refiner_layers", "layers": "n_layers"}
    return mmdit.by_block(
        {name: (int(config[count_key]), block) for name, count_key in stacks.items()}
    )
