"""Published sizes of the models that are counted, simulated and timed."""

from __future__ import annotations

from typing import Any

from maskserve_core.contracts.facts import ModelFacts

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

FLUX_DEV_SAMPLER: dict[str, Any] = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "shift": 3.0,
    "use_dynamic_shifting": True,
}
"""scheduler/scheduler_config.json of FLUX.1-dev."""

FLUX_DEV_FACTS = ModelFacts(
    family="flux",
    semantics="inpaint",
    vae_scale_factor=8,
    latent_channels=16,
    patch=2,
    native_resolution=1024,
    size_multiple=16,
    guidance="embedded",
    true_cfg=True,
    denoiser=FLUX_DEV,
)
"""What is read from the folder of FLUX.1-dev."""
