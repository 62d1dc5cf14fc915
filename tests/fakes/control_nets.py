"""Random ControlNets of the tiny models' size."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FluxControlNetModel

CHANNELS = 16
"""Of a latents' token."""


def random_net(seed: int, doubles: int, singles: int, **asked: Any) -> FluxControlNetModel:
    """Of the tiny models' size; nothing in it is zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = FluxControlNetModel(
            **{
                "in_channels": CHANNELS,
                "num_layers": doubles,
                "num_single_layers": singles,
                "attention_head_dim": 16,
                "num_attention_heads": 2,
                "joint_attention_dim": 32,
                "pooled_projection_dim": 32,
                "axes_dims_rope": (4, 6, 6),
                **asked,
            }
        ).eval()
        for name, weight in net.named_parameters():
            if name.startswith("controlnet"):
                torch.nn.init.normal_(weight, std=0.3)
    return net
