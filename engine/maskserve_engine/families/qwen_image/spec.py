"""Qwen-Image, Qwen-Image-Edit, -2509 and -2511: pipelines, defaults, model spec, counted work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from maskserve_common.config_file import read_json
from maskserve_common.contracts.dense_steps import DenseSteps
from maskserve_common.contracts.semantics import INPAINT, REFERENCE, SAMPLED_REFERENCE
from maskserve_engine.families.flux import spec as flux
from maskserve_engine.planning.flops import ModelWork
from maskserve_engine.spec import mmdit
from maskserve_engine.spec.encoder_picture import EncoderPicture
from maskserve_engine.spec.latents import latent_space
from maskserve_engine.spec.model_spec import EditDefaults, ModelSpec, least_steps, no_recorded_rows

PIPELINES = {
    "QwenImageInpaintPipeline": INPAINT,
    "QwenImageImg2ImgPipeline": INPAINT,
    "QwenImagePipeline": INPAINT,
    "QwenImageEditInpaintPipeline": SAMPLED_REFERENCE,
    "QwenImageEditPipeline": SAMPLED_REFERENCE,
    "QwenImageEditPlusPipeline": REFERENCE,
}
"""Served semantics by the class in model_index.json."""
NAME = "Qwen-Image models"
SETTINGS = ()
DEFAULTS = EditDefaults(num_inference_steps=50, guidance_scale=0.0)
"""Defaults of QwenImageInpaintPipeline, which guides if an edit has a negative prompt."""
_PLUS = EditDefaults(num_inference_steps=40, guidance_scale=0.0)
"""The publisher's settings for -2509 and -2511, whose pipeline's signature says 50."""
_ENCODER_AREA = 384 * 384
"""Pixels to which these models' pipeline scales the picture for the text encoder."""
_STRIDE = 7
_PATCH = 2

lora_work = flux.lora_work
control_work = flux.control_work
recorded_rows = no_recorded_rows


def read(folder: Path, pipeline: str, native_resolution: int) -> ModelSpec:
    """Return the model spec of a Qwen-Image folder. Raises ConfigError if a part is unreadable."""
    sampler = read_json(folder / "scheduler" / "scheduler_config.json")
    latents = latent_space(read_json(folder / "vae" / "config.json"))
    semantics, shown_spec = PIPELINES[pipeline], None
    if semantics.reference:
        processor = _of_pictures(folder / "processor")
        shown_spec = EncoderPicture.of(processor, 0 if semantics.sampled else _ENCODER_AREA)
    return ModelSpec(
        family="qwen_image",
        semantics=semantics,
        latents=latents,
        patch=_PATCH,
        native_resolution=native_resolution or 128 * latents.pixels,
        # Edit models are given sides in multiples of two tokens, as their pipelines have them.
        size_multiple=latents.pixels * _PATCH * (1 + semantics.reference),
        guidance="none",
        defaults=_PLUS if semantics is REFERENCE else DEFAULTS,
        stride=_STRIDE,
        dense_steps=DenseSteps(prompt=1, side=1),
        refresh_stride=0.0,
        true_cfg=True,
        denoiser=read_json(folder / "transformer" / "config.json"),
        control=None,
        keeps_placed=True,
        padded_to=1,
        encoder_picture=shown_spec,
        least_steps=least_steps(sampler),
    )


def _of_pictures(processor: Path) -> dict[str, Any]:
    """Return the image options of a processor's folder. transformers writes them into one file with
    the rest, and before version 5 into a separate one; it reads them in this order.
    """
    whole = processor / "processor_config.json"
    image_processor = read_json(whole).get("image_processor") if whole.is_file() else None
    return (
        image_processor
        if isinstance(image_processor, dict)
        else read_json(processor / "preprocessor_config.json")
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
    """Return FLUX.1's work, with double blocks only."""
    alike = {**config, "num_single_layers": 0, "pooled_projection_dim": 0, "guidance_embeds": False}
    base = flux.count(
        alike, height, width, halo, recorded=recorded, references=references, exact=exact
    )
    return replace(base, family="qwen_image")


def lora_layers(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the elements per rank of a LoRA on every linear layer of the blocks, for
    `lora_work`.
    """
    h = int(config["num_attention_heads"]) * int(config["attention_head_dim"])
    block = mmdit.joint_attention(h)
    block |= {f"{mlp}.net.{n}": 5 * h for mlp in ("img_mlp", "txt_mlp") for n in ("0.proj", "2")}
    return mmdit.by_block({"transformer_blocks": (int(config["num_layers"]), block)})
