"""Tiny models of nodes, of random weights: real classes, as transformers saves them."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    CLIPSegConfig,
    CLIPSegForImageSegmentation,
    CLIPSegProcessor,
    Swin2SRConfig,
    Swin2SRForImageSuperResolution,
    ViTImageProcessor,
)

from maskserve_training.text import build_clip_tokenizer


def build_find(folder: Path) -> None:
    """A CLIPSeg that finds something or other."""
    torch.manual_seed(3)
    tokenizer = build_clip_tokenizer()
    config = CLIPSegConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 16,
            "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 77,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 32, "patch_size": 8,
        },
        projection_dim=16, extract_layers=[0], reduce_dim=8, decoder_num_attention_heads=2,
        decoder_intermediate_size=16,
    )  # fmt: skip
    CLIPSegForImageSegmentation(config).save_pretrained(folder)
    images = ViTImageProcessor(size={"height": 32, "width": 32})
    CLIPSegProcessor(images, tokenizer).save_pretrained(folder)


def build_likeness(folder: Path) -> None:
    """A CLIP that likens something or other."""
    torch.manual_seed(5)
    tokenizer = build_clip_tokenizer()
    config = CLIPConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 16,
            "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 77,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 32, "patch_size": 8,
        },
        projection_dim=16,
    )  # fmt: skip
    CLIPModel(config).save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    CLIPProcessor(images, tokenizer).save_pretrained(folder)


def build_enlarge(folder: Path) -> None:
    """A Swin2SR that doubles sides."""
    torch.manual_seed(4)
    config = Swin2SRConfig(
        image_size=16, embed_dim=12, depths=[1], num_heads=[2], window_size=4, drop_path_rate=0.0,
        upsampler="pixelshuffledirect",
    )  # fmt: skip
    Swin2SRForImageSuperResolution(config).save_pretrained(folder)
