"""Published sizes of the models that are counted, simulated and timed."""

from __future__ import annotations

from typing import Any

FLUX_DEV: dict[str, Any] = {
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "pooled_projection_dim": 768,
    "joint_attention_dim": 4096,
    "guidance_embeds": True,
}
"""transformer/config.json of FLUX.1-dev."""
