"""A FLUX.3 klein of toy size with random weights, in diffusers format; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.tiny_flux2 import chat_tokenizer, random_vae
from tests.fakes.tiny_model import CONFIG, LATENT_CHANNELS

TEXT = 16
"""Width of the text encoder."""


def build_tiny_flux3(folder: Path, *, distilled: bool = True) -> Path:
    """Write the model to `folder` and return it. `distilled` False: a base model."""
    import torch
    from diffusers import Flux3Transformer2DModel
    from diffusers.modular_pipelines.flux3 import Flux3AutoBlocks, Flux3DistilledAutoBlocks
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    tokenizer = chat_tokenizer()
    text = {
        "vocab_size": len(tokenizer), "hidden_size": TEXT, "intermediate_size": TEXT,
        "num_hidden_layers": 33, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": TEXT, "intermediate_size": TEXT, "num_heads": 2,
        "out_hidden_size": TEXT, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    channels = 4 * LATENT_CHANNELS
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae = random_vae()
        transformer = Flux3Transformer2DModel(
            in_channels=channels,
            cond_in_channels=channels,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=8 * TEXT,
            axes_dims_rope=(4, 4, 4, 4),
            flow_map=distilled,
        )
        pipeline = (Flux3DistilledAutoBlocks if distilled else Flux3AutoBlocks)().init_pipeline()
        pipeline.update_components(
            vae=vae,
            transformer=transformer,
            text_encoder=Qwen3VLForConditionalGeneration(
                Qwen3VLConfig(text_config=text, vision_config=vision)
            ),
            tokenizer=tokenizer,
        )
    for name, module in transformer.named_modules():
        if name.endswith(("norm_q", "norm_k")):
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
    pipeline.save_pretrained(str(folder), overwrite_modular_index=True)
    config = CONFIG.replace("guidance_scale = 3.0\n", "") if distilled else CONFIG
    (folder / "maskserve.toml").write_text(
        config.replace("max_sequence_length = 16", "max_sequence_length = 160"), "utf-8"
    )
    return folder
