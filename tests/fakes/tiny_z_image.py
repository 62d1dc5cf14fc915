"""A Z-Image of toy size with random weights, in diffusers format; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.tiny_flux2 import chat_tokenizer
from tests.fakes.tiny_model import CONFIG, LATENT_CHANNELS, tiny_vae

TEXT = 16
"""Width of the text encoder."""


def build_tiny_z_image(folder: Path, *, turbo: bool = False) -> Path:
    """Write the model to `folder` and return it."""
    import torch
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        ZImageInpaintPipeline,
        ZImageTransformer2DModel,
    )
    from transformers import Qwen3Config, Qwen3Model

    tokenizer = chat_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=TEXT, intermediate_size=TEXT,
            num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        )  # fmt: skip
        pipeline = ZImageInpaintPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0 if turbo else 6.0),
            vae=tiny_vae(LATENT_CHANNELS),
            text_encoder=Qwen3Model(config),
            tokenizer=tokenizer,
            transformer=ZImageTransformer2DModel(
                in_channels=LATENT_CHANNELS,
                dim=64,
                n_layers=2,
                n_refiner_layers=1,
                n_heads=4,
                n_kv_heads=4,
                cap_feat_dim=TEXT,
                axes_dims=[4, 6, 6],
                axes_lens=[512, 64, 64],
            ),
        )
        transformer = pipeline.transformer
        for name, weight in transformer.named_parameters():
            if "norm" in name and weight.dim() == 1:
                torch.nn.init.uniform_(weight, 0.5, 1.5)
            if name.endswith("pad_token"):
                torch.nn.init.normal_(weight)
    pipeline.save_pretrained(folder)
    settings = CONFIG.replace("guidance_scale = 3.0\n", "")
    (folder / "maskserve.toml").write_text(
        settings.replace("max_sequence_length = 16", "max_sequence_length = 320"), "utf-8"
    )
    return folder
