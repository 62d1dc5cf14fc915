"""diffusers' own pipelines, asked for what our edits ask."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from maskserve_core.contracts.settings import EditSettings
from tests.fakes.jobs import Case


def diffusers_edit(
    pipeline: Any,
    pixels: NDArray[np.uint8],
    mask: NDArray[np.uint8],
    prompt: str,
    settings: EditSettings,
    seed: int,
    **asked: Any,
) -> Any:
    """`images` of an inpainting pipeline, at the picture's own size.

    `asked` are further arguments of the pipeline, such as `output_type`.
    """
    height, width = mask.shape
    if settings.negative_prompt is not None:
        # For SDXL no negative prompt is another thing than an empty one; with us they are the same.
        zeros = pipeline.config.get("force_zeros_for_empty_prompt", False)
        asked["negative_prompt"] = (
            (settings.negative_prompt or None) if zeros else (settings.negative_prompt)
        )
        if settings.true_cfg_scale is not None:
            asked["true_cfg_scale"] = settings.true_cfg_scale
    return pipeline(
        prompt=prompt,
        image=Image.fromarray(pixels),
        mask_image=Image.fromarray(mask),
        height=height,
        width=width,
        num_inference_steps=settings.num_inference_steps,
        guidance_scale=settings.guidance_scale,
        strength=settings.strength,
        generator=torch.Generator("cpu").manual_seed(seed),
        **asked,
    ).images


def diffusers_latents(pipeline: Any, case: Case, **asked: Any) -> NDArray[np.float32]:
    """[C, h, w] of the tiny model's Flux pipeline, before they are decoded."""
    if type(pipeline).__name__.startswith("FluxKontext"):
        asked["_auto_resize"] = False  # sizes of pictures are the server's
    tokens = diffusers_edit(
        pipeline,
        case.pixels,
        case.mask,
        case.prompt,
        case.settings,
        case.seed,
        max_sequence_length=16,
        output_type="latent",
        **asked,
    )
    factor = pipeline.vae_scale_factor
    latents: torch.Tensor = pipeline._unpack_latents(tokens, *case.mask.shape, factor)
    return latents[0].float().cpu().numpy()
