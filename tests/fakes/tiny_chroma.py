"""A Chroma of toy size with random weights, in diffusers format; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.tiny_model import CONFIG, LATENT_CHANNELS, WIDTH, t5_tokenizer, tiny_vae


def build_tiny_chroma(folder: Path) -> Path:
    """Write the model to `folder` and return it."""
    import torch
    from diffusers import (
        ChromaInpaintPipeline,
        ChromaTransformer2DModel,
        FlowMatchEulerDiscreteScheduler,
    )
    from transformers import T5Config, T5EncoderModel

    tokenizer = t5_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline = ChromaInpaintPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_shift=0.9),
            vae=tiny_vae(LATENT_CHANNELS),
            text_encoder=T5EncoderModel(
                T5Config(
                    vocab_size=len(tokenizer), d_model=WIDTH, d_kv=16, d_ff=WIDTH, num_layers=1,
                    num_heads=2,
                )
            ),
            tokenizer=tokenizer,
            transformer=ChromaTransformer2DModel(
                in_channels=4 * LATENT_CHANNELS,
                num_layers=2,
                num_single_layers=2,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=WIDTH,
                axes_dims_rope=(4, 6, 6),
                approximator_num_channels=16,
                approximator_hidden_dim=WIDTH,
                approximator_layers=2,
            ),
        )  # fmt: skip
        for block in pipeline.transformer.transformer_blocks:
            for norm in (block.attn.norm_q, block.attn.norm_added_k):
                torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    pipeline.save_pretrained(folder)
    (folder / "maskserve.toml").write_text(
        CONFIG.replace("max_sequence_length = 16", "max_sequence_length = 64"), "utf-8"
    )
    return folder
