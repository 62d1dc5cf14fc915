"""Qwen-Image, Qwen-Image-Edit, -2509 and -2511: pipelines, defaults, model spec, counted work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maskserve_common.config import Config
from maskserve_common.config_file import read_json
from maskserve_common.contracts.semantics import INPAINT, REFERENCE, SAMPLED_REFERENCE, DenseSteps
from maskserve_engine.planning.flops import ModelWork
from maskserve_engine.planning.layer_table import Layers
from maskserve_engine.spec import mmdit
from maskserve_engine.spec.encoder_picture import EncoderPicture
from maskserve_engine.spec.family import StepPicture
from maskserve_engine.spec.latents import latent_space
from maskserve_engine.spec.model_spec import (
    ALL_KINDS,
    SOURCE_KINDS,
    ControlNetSpec,
    EditDefaults,
    ModelSpec,
    RefreshSpec,
    least_steps,
)

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
_MOST_PICTURES = 3
"""References that -2509 and -2511 are trained on, by their cards."""

CONTROL = ControlNetSpec(
    net="QwenImageControlNetModel",
    latents=True,
    equal=("num_attention_heads", "attention_head_dim", "joint_attention_dim", "axes_dims_rope"),
    mask="extra_condition_channels",
)
_TEMPLATE = 34
"""Tokens of the template before a prompt, which the pipeline drops."""
RECORDED_ROWS = 3.8
"""Dense rows whose tokens the longest recorded step has: half of the steps of an edit with eight
steps compute all tokens.
"""


def read(folder: Path, pipeline: str, native_resolution: int) -> ModelSpec:
    """Return the model spec of a Qwen-Image folder. Raises ConfigError if a part is unreadable."""
    sampler = read_json(folder / "scheduler" / "scheduler_config.json")
    latents = latent_space(read_json(folder / "vae" / "config.json"))
    semantics, shown_spec = PIPELINES[pipeline], None
    if semantics.reference:
        area = 0 if semantics.sampled else _ENCODER_AREA
        shown_spec = EncoderPicture.of(folder / "processor", area)
    return ModelSpec(
        family="qwen_image",
        semantics=semantics,
        latents=latents,
        patch=_PATCH,
        native_resolution=native_resolution or 128 * latents.pixels,
        # Edit models are given sides in multiples of two tokens, as their pipelines have them.
        size_multiple=latents.pixels * _PATCH * (1 + semantics.reference),
        edit_size="area" if semantics.reference else "bounded",
        most_pictures=_MOST_PICTURES if semantics is REFERENCE else 1,
        reference_size="area",
        guidance="none",
        defaults=_PLUS if semantics is REFERENCE else DEFAULTS,
        stride=_STRIDE,
        dense_steps=DenseSteps(prompt=1, side=1),
        refresh=RefreshSpec(stride=0.0),
        true_cfg=True,
        denoiser=read_json(folder / "transformer" / "config.json"),
        control=None if semantics.reference else CONTROL,
        edit_kinds=SOURCE_KINDS if semantics.reference else ALL_KINDS,
        keeps_placed=True,
        padded_to=1,
        encoder_picture=shown_spec,
        recorded_text="" if semantics.reference else "text_encoder",
        text_layers=2,  # the embedded tokens, and the last ones
        template_tokens=_TEMPLATE,
        least_steps=least_steps(sampler),
    )


def recorded_rows(spec: ModelSpec, config: Config) -> float:
    """Return `mmdit.recorded_rows`: more than of other models, but of edit models, whose rows have
    twice the tokens.
    """
    most = mmdit.RECORDED_ROWS if spec.semantics.reference else RECORDED_ROWS
    return mmdit.recorded_rows(spec, config, most)


def count(config: Mapping[str, Any], picture: StepPicture) -> ModelWork:
    """Return the work of a QwenImageTransformer2DModel: FLUX.1's double blocks."""
    h = mmdit.width_of(config)
    layers: Layers = {
        "row": {"img_mod.1": (h, 6 * h), "txt_mod.1": (h, 6 * h)},
        "token": mmdit.attention(h, mmdit.IMAGE) | mmdit.feed_forward("img_mlp", h),
        "text": mmdit.attention(h, mmdit.TEXT) | mmdit.feed_forward("txt_mlp", h),
        "spare": mmdit.attention(h, mmdit.KEYS),
    }
    blocks = mmdit.stack("transformer_blocks", int(config["num_layers"]), mmdit.BlockLayers(layers))
    before: Layers = {
        "row": mmdit.embedder("time_text_embed.timestep_embedder", 256, h),
        "token": {"img_in": (int(config["in_channels"]), h)},
        "text": {"txt_in": (int(config["joint_attention_dim"]), h)},
    }
    model = mmdit.TransformerLayers(blocks, before, mmdit.last_layers(config))
    return model.work("qwen_image", config, picture)


def control_work(config: dict[str, Any], height: int, width: int) -> ModelWork:
    """Return the work of a QwenImageControlNetModel beside its base, from the net's config.json and
    a size in latents.
    """
    work = count(config, StepPicture(height, width))
    channels = int(config["in_channels"]) + int(config.get(CONTROL.mask) or 0)
    return mmdit.control_work(work, channels)
