"""A LongCat-Image or LongCat-Image-Edit of toy size with random weights, in diffusers format;
nothing is downloaded.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.fakes.tiny_flux2 import chat_tokenizer
from tests.fakes.tiny_model import CONFIG, tiny_vae
from tests.fakes.tiny_qwen_image import TEXT, VISION, tiny_qwen_vl

LENGTH = 96
"""Tokens of a prompt."""
CHANNELS = 16
"""Latent channels, which the pipelines take for granted."""


def build_tiny_longcat(folder: Path, *, edits: bool = False) -> Path:
    """Write the model to `folder` and return it; `edits`: the model that edits pictures."""
    import torch
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        LongCatImageEditPipeline,
        LongCatImagePipeline,
        LongCatImageTransformer2DModel,
    )
    from transformers import Qwen2VLImageProcessorPil, Qwen2VLProcessor

    from maskserve_engine.families.qwen_image.encode import picture_processor

    tokenizer = chat_tokenizer(more=VISION)
    processor = picture_processor(Qwen2VLProcessor, Qwen2VLImageProcessorPil(), tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline = (LongCatImageEditPipeline if edits else LongCatImagePipeline)(
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
            vae=tiny_vae(CHANNELS),
            text_encoder=tiny_qwen_vl(tokenizer),
            tokenizer=tokenizer,
            text_processor=processor,
            transformer=LongCatImageTransformer2DModel(
                in_channels=4 * CHANNELS,
                num_layers=1,
                num_single_layers=2,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=TEXT,
                pooled_projection_dim=TEXT,
                axes_dims_rope=[4, 6, 6],
            ),
        )
        for block in pipeline.transformer.transformer_blocks:
            for norm in (block.attn.norm_q, block.attn.norm_added_k):
                torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    pipeline.save_pretrained(folder)
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    index["text_processor"] = ["transformers", "Qwen2VLProcessor"]
    (folder / "model_index.json").write_text(json.dumps(index), "utf-8")
    (folder / "maskserve.toml").write_text(
        CONFIG.replace("max_sequence_length = 16", f"max_sequence_length = {LENGTH}"), "utf-8"
    )
    return folder
