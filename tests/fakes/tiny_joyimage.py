"""A JoyImage-Edit of toy size with random weights, in diffusers format; nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path

from tests.fakes.tiny_flux2 import chat_tokenizer
from tests.fakes.tiny_model import CONFIG, LATENT_CHANNELS
from tests.fakes.tiny_qwen_image import SPOKEN, VAE, VISION
from tests.fakes.tiny_qwen_image21 import TEXT, qwen3_pictures, tiny_qwen3_vl

LENGTH = 96
"""Tokens of a prompt."""


def build_tiny_joyimage(folder: Path) -> Path:
    """Write the model to `folder` and return it."""
    import torch
    from diffusers import (
        AutoencoderKLWan,
        FlowMatchEulerDiscreteScheduler,
        JoyImageEditPipeline,
        JoyImageEditTransformer3DModel,
    )
    from transformers import Qwen3VLProcessor

    from maskserve_engine.families.qwen_image.encode import picture_processor

    tokenizer = chat_tokenizer([SPOKEN], VISION)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline = JoyImageEditPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=4.0),
            vae=AutoencoderKLWan(**VAE, scale_factor_temporal=1, scale_factor_spatial=4),
            text_encoder=tiny_qwen3_vl(tokenizer),
            tokenizer=tokenizer,
            processor=picture_processor(Qwen3VLProcessor, qwen3_pictures(), tokenizer),
            transformer=JoyImageEditTransformer3DModel(
                in_channels=LATENT_CHANNELS,
                hidden_size=32,
                num_attention_heads=2,
                text_dim=TEXT,
                num_layers=3,
                rope_dim_list=[4, 6, 6],
                theta=10000,
            ),
        )
        for block in pipeline.transformer.double_blocks:
            for table in (block.img_mod.modulate_table, block.txt_mod.modulate_table):
                torch.nn.init.normal_(table, std=0.3)
            for norm in (block.attn.img_attn_q_norm, block.attn.txt_attn_k_norm):
                torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    pipeline.save_pretrained(folder)
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    index["processor"] = ["transformers", "Qwen3VLProcessor"]
    (folder / "model_index.json").write_text(json.dumps(index), "utf-8")
    config = CONFIG.replace("guidance_scale = 3.0\n", "")
    (folder / "maskserve.toml").write_text(
        config.replace("max_sequence_length = 16", f"max_sequence_length = {LENGTH}"), "utf-8"
    )
    return folder
