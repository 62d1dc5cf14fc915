"""The model spec for tests without a model folder."""

from __future__ import annotations

from maskserve_common.contracts.semantics import FILL
from maskserve_engine.spec.latents import LatentSpace
from maskserve_engine.spec.mmdit import CONTROL
from maskserve_engine.spec.model_spec import ALL_STEPS, EditDefaults, ModelSpec

FILL_SPEC = ModelSpec(
    family="flux",
    semantics=FILL,
    latents=LatentSpace(pixels=4, channels=4),
    patch=2,
    native_resolution=128,
    size_multiple=8,
    guidance="embedded",
    defaults=EditDefaults(num_inference_steps=28, guidance_scale=30.0),
    stride=ALL_STEPS,
    elastic=True,
    true_cfg=False,
    denoiser={},
    control=CONTROL,
)
"""A small FLUX.1 Fill."""
