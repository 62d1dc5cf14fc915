"""A Qwen-Image of toy size with random weights, in diffusers format; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.tiny_flux2 import chat_tokenizer
from tests.fakes.tiny_model import CONFIG, LATENT_CHANNELS

TEXT = 16
"""Width of the text encoder."""
SPOKEN = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, "
    "quantity, text, spatial relationships of the objects and background:<|im_end|>\n"
    "<|im_start|>user\n"
)
"""What stands before every prompt: 34 tokens, which the pipeline drops."""


def build_tiny_qwen_image(folder: Path) -> Path:
    """Write the model to `folder` and return it."""
    import torch
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImageInpaintPipeline,
        QwenImageTransformer2DModel,
    )
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = chat_tokenizer([SPOKEN])
    assert len(tokenizer(SPOKEN).input_ids) == 34
    text = {
        "vocab_size": len(tokenizer), "hidden_size": TEXT, "intermediate_size": TEXT,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]},
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": TEXT, "intermediate_size": TEXT, "num_heads": 2,
        "out_hidden_size": TEXT,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline = QwenImageInpaintPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True, shift_terminal=0.02, max_shift=0.9
            ),
            vae=AutoencoderKLQwenImage(
                base_dim=8,
                z_dim=LATENT_CHANNELS,
                dim_mult=[1, 1, 1],
                num_res_blocks=1,
                temperal_downsample=[False, False],
                latents_mean=[0.3, -0.2, 0.1, 0.7],
                latents_std=[1.5, 0.5, 2.0, 1.2],
            ),
            text_encoder=Qwen2_5_VLForConditionalGeneration(
                Qwen2_5_VLConfig(text_config=text, vision_config=vision)
            ),
            tokenizer=tokenizer,
            transformer=QwenImageTransformer2DModel(
                in_channels=4 * LATENT_CHANNELS,
                out_channels=LATENT_CHANNELS,
                num_layers=3,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=TEXT,
                axes_dims_rope=(4, 6, 6),
            ),
        )
        for block in pipeline.transformer.transformer_blocks:
            for norm in (block.attn.norm_q, block.attn.norm_added_k, pipeline.transformer.txt_norm):
                torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    pipeline.save_pretrained(folder)
    config = CONFIG.replace("guidance_scale = 3.0\n", "")
    (folder / "maskserve.toml").write_text(
        config.replace("max_sequence_length = 16", "max_sequence_length = 320"), "utf-8"
    )
    return folder
