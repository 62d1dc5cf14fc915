"""A Qwen-Image-2.1 of toy size with random weights, in diffusers format; nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.fakes.tiny_flux2 import PARTS_TEMPLATE, chat_tokenizer
from tests.fakes.tiny_model import CONFIG, LATENT_CHANNELS
from tests.fakes.tiny_qwen_image import VISION

TEXT = 16
"""Width of the text encoder."""
_SPOKEN = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"


def build_tiny_qwen_image21(folder: Path, sigmas: list[float] | None = None) -> Path:
    """Write the model to `folder` and return it; with `sigmas`, a model distilled to them."""
    import torch
    from diffusers import (
        AutoencoderKLQwenImage21,
        FlowMatchEulerDiscreteScheduler,
        QwenImage21Pipeline,
        QwenImage21Transformer2DModel,
    )
    from transformers import Qwen3VLProcessor

    from maskserve_engine.families.qwen_image.encode import picture_processor

    tokenizer = chat_tokenizer([_SPOKEN], VISION)
    tokenizer.chat_template = PARTS_TEMPLATE
    channels = 4 * LATENT_CHANNELS
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline = QwenImage21Pipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True, shift_terminal=0.02, max_shift=0.9
            ),
            vae=AutoencoderKLQwenImage21(
                base_dim=8,
                decoder_base_dim=8,
                z_dim=channels,
                dim_mult=[1, 1, 1, 1, 1],
                num_res_blocks=1,
                temperal_downsample=[False] * 4,
                latents_mean=torch.linspace(-1, 1, channels).tolist(),
                latents_std=torch.linspace(0.5, 2, channels).tolist(),
            ),
            text_encoder=tiny_qwen3_vl(tokenizer),
            processor=picture_processor(Qwen3VLProcessor, qwen3_pictures(), tokenizer),
            transformer=QwenImage21Transformer2DModel(
                in_channels=channels,
                out_channels=channels,
                num_layers=3,
                attention_head_dim=16,
                num_attention_heads=2,
                context_in_dim=TEXT,
                axes_dims_rope=(4, 6, 6),
            ),
            sample_sigmas=sigmas,
        )
        for block in pipeline.transformer.transformer_blocks:
            for norm in (block.attn.norm_q, block.attn.norm_k):
                torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
        torch.nn.init.uniform_(pipeline.transformer.txt_in.text_norm.weight, -0.5, 0.5)
    pipeline.save_pretrained(folder)
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    index["processor"] = ["transformers", "Qwen3VLProcessor"]
    (folder / "model_index.json").write_text(json.dumps(index), "utf-8")
    config = CONFIG.replace("guidance_scale = 3.0\n", "")
    (folder / "maskserve.toml").write_text(
        config.replace("max_sequence_length = 16", "max_sequence_length = 320"), "utf-8"
    )
    return folder


def qwen3_pictures() -> Any:
    """Return the processor of pictures of a Qwen3-VL."""
    from transformers import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        patch_size=16, merge_size=2, min_pixels=1024, max_pixels=16_777_216
    )


def tiny_qwen3_vl(tokenizer: Any) -> Any:
    """Return a small Qwen3-VL, from torch's generator."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text = {
        "vocab_size": len(tokenizer), "hidden_size": TEXT, "intermediate_size": TEXT,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                            "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": TEXT, "intermediate_size": TEXT, "num_heads": 2,
        "out_hidden_size": TEXT, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    start, end, image, video = tokenizer.convert_tokens_to_ids(VISION)
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    return Qwen3VLForConditionalGeneration(config)
