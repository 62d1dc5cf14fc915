"""What tests without a model folder are told of the model."""

from __future__ import annotations

from maskserve_core.contracts.facts import ModelFacts

FILL_FACTS = ModelFacts(
    family="flux",
    semantics="fill",
    vae_scale_factor=4,
    latent_channels=4,
    patch=2,
    native_resolution=128,
    size_multiple=8,
    guidance="embedded",
    true_cfg=False,
    denoiser={},
)
"""A small FLUX.1 Fill."""
