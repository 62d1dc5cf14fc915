"""A Qwen-Image of toy size with random weights, in diffusers format; nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.fakes.tiny_flux2 import chat_tokenizer
from tests.fakes.tiny_model import CONFIG, LATENT_CHANNELS

TEXT = 16
"""Width of the text encoder."""
SPOKEN = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, "
    "quantity, text, spatial relationships of the objects and background:<|im_end|>\n"
    "<|im_start|>user\n"
)
"""The text before every prompt: 34 tokens, which the pipeline drops."""
SPOKEN_OF_EDITS = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, "
    "texture, objects, background), then explain how the user's text instruction should alter or "
    "modify the image. Generate a new image that meets the user's requirements while maintaining "
    "consistency with the original input where appropriate.<|im_end|>\n<|im_start|>user\n"
)
"""The text before every prompt of edit models: 64 tokens."""
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
EDIT, PLUS, PLUS_2511 = "QwenImageEditPipeline", "QwenImageEditPlusPipeline", "2511"
VAE: dict[str, Any] = {
    "base_dim": 8,
    "z_dim": LATENT_CHANNELS,
    "dim_mult": [1, 1, 1],
    "num_res_blocks": 1,
    "temperal_downsample": [False, False],
    "latents_mean": [0.3, -0.2, 0.1, 0.7],
    "latents_std": [1.5, 0.5, 2.0, 1.2],
}
"""Configuration of the VAE, which is Wan's, too."""


def build_tiny_qwen_image(folder: Path, edits: str = "") -> Path:
    """Write the model to `folder` and return it; `edits`: the name of an edit model."""
    import torch
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImageInpaintPipeline,
        QwenImageTransformer2DModel,
    )

    tokenizer = chat_tokenizer([SPOKEN_OF_EDITS if edits else SPOKEN], VISION)
    assert len(tokenizer(SPOKEN_OF_EDITS if edits else SPOKEN).input_ids) == (64 if edits else 34)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline = QwenImageInpaintPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True, shift_terminal=0.02, max_shift=0.9
            ),
            vae=AutoencoderKLQwenImage(**VAE),
            text_encoder=tiny_qwen_vl(tokenizer),
            tokenizer=tokenizer,
            transformer=QwenImageTransformer2DModel(
                in_channels=4 * LATENT_CHANNELS,
                out_channels=LATENT_CHANNELS,
                num_layers=3,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=TEXT,
                axes_dims_rope=(4, 6, 6),
                zero_cond_t=edits == PLUS_2511,
            ),
        )
        for block in pipeline.transformer.transformer_blocks:
            for norm in (block.attn.norm_q, block.attn.norm_added_k, pipeline.transformer.txt_norm):
                torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    pipeline.save_pretrained(folder)
    if edits:
        _as_edit_model(folder, PLUS if edits == PLUS_2511 else edits, tokenizer)
    config = CONFIG.replace("guidance_scale = 3.0\n", "")
    (folder / "maskserve.toml").write_text(
        config.replace("max_sequence_length = 16", "max_sequence_length = 320"), "utf-8"
    )
    return folder


def tiny_qwen_vl(tokenizer: Any) -> Any:
    """Return a small Qwen2.5-VL, from torch's generator."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        "vocab_size": len(tokenizer), "hidden_size": TEXT, "intermediate_size": TEXT,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]},
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": TEXT, "intermediate_size": TEXT, "num_heads": 2,
        "out_hidden_size": TEXT, "fullatt_block_indexes": [0],
    }  # fmt: skip
    start, end, image, video = tokenizer.convert_tokens_to_ids(VISION)
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def _as_edit_model(folder: Path, pipeline: str, tokenizer: Any) -> None:
    """Name the pipeline, and add the processor of pictures. For Qwen-Image-Edit it is a file of its
    own, as in the published model. For the others it is beside the rest, as transformers saves
    processors since version 5.
    """
    from transformers import Qwen2VLImageProcessorPil, Qwen2VLProcessor

    from maskserve_engine.families.qwen_image.encode import picture_processor

    pictures = Qwen2VLImageProcessorPil(max_pixels=12_845_056)
    whole = picture_processor(Qwen2VLProcessor, pictures, tokenizer)
    (pictures if pipeline == EDIT else whole).save_pretrained(folder / "processor")
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    index |= {"_class_name": pipeline, "processor": ["transformers", "Qwen2VLProcessor"]}
    (folder / "model_index.json").write_text(json.dumps(index), "utf-8")
