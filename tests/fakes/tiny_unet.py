"""Stable Diffusion models of toy size with random weights, in diffusers format.

Every part is the real diffusers or transformers class, as in `tiny_model`. The levels differ in
depth and in attention, as they do in SDXL and SD 2.1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fakes.tiny_model import clip_tokenizer

CONFIG = """\
# Defaults of the tiny model.
[model]
num_inference_steps = 4
guidance_scale = 3.0

[limits]
max_steps = 1000
"""

VARIANTS = ("sd-base", "sd-fill", "sdxl-base", "sdxl-fill")
"""Names of the models that tests use. The part after the hyphen is `fill` or `base`."""

EACH_SORT = [
    name if name in ("sd-base", "sdxl-fill") else pytest.param(name, marks=pytest.mark.slow)
    for name in VARIANTS
]
"""Parameters of a test: one model each of SD and SDXL and of both semantics. The other models run
with slow tests.
"""

CHANNELS = 4
FACTOR = 4
NATIVE = 64
WIDTH = 32
TEXT_LENGTH = 12


def build_tiny_unet(folder: Path, *, xl: bool, fill: bool, seed: int = 0) -> Path:
    """Write a model to `folder` and return it.

    Args:
        folder: made if missing.
        xl: SDXL (two text encoders, micro-conditioning), else Stable Diffusion 2.1.
        fill: an inpainting UNet of 9 channels, else a base one of 4.
        seed: of the random weights; equal seeds give equal files.
    """
    import torch
    from diffusers import StableDiffusionInpaintPipeline, StableDiffusionXLInpaintPipeline

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts: dict[str, Any] = _sdxl(fill) if xl else _sd(fill)
        if xl:
            pipeline: Any = StableDiffusionXLInpaintPipeline(**parts)
        else:
            pipeline = StableDiffusionInpaintPipeline(**parts, requires_safety_checker=False)
    pipeline.save_pretrained(folder)
    (folder / "maskserve.toml").write_text(CONFIG, encoding="utf-8")
    return folder


def samplers() -> dict[str, Any]:
    """A sampler of every served sort, by name."""
    from diffusers import (
        DDIMScheduler,
        DPMSolverMultistepScheduler,
        EulerDiscreteScheduler,
        PNDMScheduler,
        UniPCMultistepScheduler,
    )

    betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    classic = {"set_alpha_to_one": False, "steps_offset": 1}
    return {
        "pndm": PNDMScheduler(**betas, **classic, skip_prk_steps=True),
        "pndm-v": PNDMScheduler(
            **betas, **classic, skip_prk_steps=True, prediction_type="v_prediction"
        ),
        "euler": EulerDiscreteScheduler(**betas, steps_offset=1, timestep_spacing="leading"),
        "euler-linspace": EulerDiscreteScheduler(**betas),
        "euler-karras-v": EulerDiscreteScheduler(
            **betas, use_karras_sigmas=True, prediction_type="v_prediction"
        ),
        "dpm2m": DPMSolverMultistepScheduler(**betas),
        "dpm2m-karras": DPMSolverMultistepScheduler(
            **betas, use_karras_sigmas=True, steps_offset=1
        ),
        "unipc": UniPCMultistepScheduler(**betas),
        "ddim": DDIMScheduler(**betas, **classic, clip_sample=False),
        "ddim-v-zero-snr": DDIMScheduler(
            **betas, clip_sample=False, prediction_type="v_prediction",
            rescale_betas_zero_snr=True, timestep_spacing="trailing",
        ),
    }  # fmt: skip


def _sd(fill: bool) -> dict[str, Any]:
    from diffusers import UNet2DConditionModel

    tokens = clip_tokenizer()
    tokens.model_max_length = TEXT_LENGTH
    return {
        "scheduler": samplers()["pndm"],
        "vae": _vae(),
        "text_encoder": _clip(tokens, projected=False),
        "tokenizer": tokens,
        "unet": UNet2DConditionModel(
            sample_size=NATIVE // FACTOR,
            in_channels=2 * CHANNELS + 1 if fill else CHANNELS,
            out_channels=CHANNELS,
            down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
            block_out_channels=(32, 64, 64),
            layers_per_block=1,
            norm_num_groups=8,
            cross_attention_dim=WIDTH,
            attention_head_dim=(1, 2, 2),
            use_linear_projection=not fill,
        ),
        "safety_checker": None,
        "feature_extractor": None,
    }


def _sdxl(fill: bool) -> dict[str, Any]:
    from diffusers import UNet2DConditionModel

    tokens = clip_tokenizer()
    tokens.model_max_length = TEXT_LENGTH
    return {
        "scheduler": samplers()["euler"],
        "vae": _vae(),
        "text_encoder": _clip(tokens, projected=False),
        "text_encoder_2": _clip(tokens, projected=True),
        "tokenizer": tokens,
        "tokenizer_2": tokens,
        "unet": UNet2DConditionModel(
            sample_size=NATIVE // FACTOR,
            in_channels=2 * CHANNELS + 1 if fill else CHANNELS,
            out_channels=CHANNELS,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            block_out_channels=(32, 64, 64),
            transformer_layers_per_block=(1, 2, 3),
            layers_per_block=1,
            norm_num_groups=8,
            cross_attention_dim=2 * WIDTH,
            attention_head_dim=(1, 2, 2),
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + WIDTH,
        ),
    }


def _vae() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=CHANNELS,
        norm_num_groups=4,
        sample_size=NATIVE,
        scaling_factor=0.18215,
    )


def _clip(tokens: Any, *, projected: bool) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(tokens),
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        projection_dim=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=tokens.bos_token_id,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
    )
    return CLIPTextModelWithProjection(config) if projected else CLIPTextModel(config)
