"""Published sizes of the models that are counted, simulated and timed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_common.config_file import read_json
from maskserve_engine.families.flux import spec as flux
from maskserve_engine.families.specs import load_spec

FLUX_DEV: dict[str, Any] = {
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "pooled_projection_dim": 768,
    "joint_attention_dim": 4096,
    "guidance_embeds": True,
}
"""transformer/config.json of FLUX.1-dev."""


def _shapes(name: str) -> Path:
    return CHECKOUT / "assets" / "models" / f"{name}-shapes"


def _transformer(name: str) -> dict[str, Any]:
    """transformer/config.json of a folder of shapes, as arguments of its class."""
    config = read_json(_shapes(name) / "transformer" / "config.json")
    return {key: value for key, value in config.items() if not key.startswith("_")}


KLEIN_4B = _transformer("flux2-klein-4b")
"""Transformer of FLUX.2 klein 4B: the widths with which DiffSynth-Studio
(diffsynth/configs/model_configs.py) makes the model of its file. Klein 9B's widths come from there,
too."""

KLEIN_9B = _transformer("flux2-klein-9b")
"""Transformer of FLUX.2 klein 9B."""

QWEN_IMAGE = _transformer("qwen-image")
"""Transformer of Qwen-Image, Qwen-Image-Edit and -2509: the default of its class."""

QWEN_2511 = _transformer("qwen-image-edit-2511")
"""Transformer of Qwen-Image-Edit-2511."""

QWEN_EDIT_SHOWN, QWEN_PLUS_SHOWN = 37**2, 14**2
"""Tokens of a square picture in the text encoder's view: at 1024x1024 for Qwen-Image-Edit, at
384x384 for -2509 and -2511. Each token covers 28 x 28 pixels."""

QWEN_21 = _transformer("qwen-image-2.1")
"""Transformer of Qwen-Image-2.1: the default of its class."""

Z_IMAGE = _transformer("z-image")
"""Transformer of Z-Image and Z-Image-Turbo: the default of their class."""

FLUX_DEV_SAMPLER: dict[str, Any] = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "shift": 3.0,
    "use_dynamic_shifting": True,
}
"""scheduler/scheduler_config.json of FLUX.1-dev."""

T5_XXL: dict[str, Any] = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
"""text_encoder_2/config.json of FLUX.1: the keys that differ from T5's default."""

FLUX_VAE: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 16,
}
"""vae/config.json of FLUX.1: the keys that differ from the class's default."""

FLUX_FILL_SPEC = load_spec(_shapes("flux1-fill"))
"""Model spec of FLUX.1-Fill-dev, as a worker loads it from a folder."""

FLUX_DEV_SPEC = replace(
    flux.read(_shapes("flux1-fill"), "FluxInpaintPipeline", 0), denoiser=FLUX_DEV
)
"""Model spec of FLUX.1-dev."""

SDXL: dict[str, Any] = {
    "sample_size": 128,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 2,
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
"""unet/config.json of SDXL base."""

SD21: dict[str, Any] = {
    "sample_size": 96,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (320, 640, 1280, 1280),
    "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
    "layers_per_block": 2,
    "attention_head_dim": (5, 10, 20, 20),
    "cross_attention_dim": 1024,
    "use_linear_projection": True,
}
"""unet/config.json of Stable Diffusion 2.1."""

SDXL_SPEC = load_spec(_shapes("sdxl"))
"""Model spec of SDXL base."""

SD21_SPEC = load_spec(_shapes("sd21"))
"""Model spec of Stable Diffusion 2.1."""
