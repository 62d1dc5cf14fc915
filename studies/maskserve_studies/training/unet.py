"""The demo UNet: a tiny Stable Diffusion 2.1 inpainting model beside the FLUX demo model.

It shares the demo model's scenes, prompts, CLIP text encoder and VAE. The VAE is reduced to its
four strongest channels, because diffusers' inpainting pipeline takes only UNets of 4 or 9 channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from torch import nn

from maskserve_studies.training.text import WIDTH
from maskserve_studies.training.transformer import sample_times
from maskserve_studies.training.vae import build_vae

LATENT_CHANNELS: Final = 4
TEXT_LENGTH: Final = 24
"""Tokens of a prompt: the CLIP tokenizer's model_max_length, to which the pipeline pads."""
OUTSIDE_WEIGHT: Final = 0.1  # weight of the loss outside the mask


@dataclass(frozen=True)
class Batch:
    """Edits of one latent shape, in the form of StableDiffusionInpaintPipeline."""

    clean: torch.Tensor
    """(B, 4, h, w) latents of the right answer, scaled."""
    masked: torch.Tensor
    """(B, 4, h, w) latents of the masked source, scaled."""
    mask: torch.Tensor
    """(B, 1, h, w) 0 or 1: the pixel mask, sampled at the nearest pixel."""
    prompt: torch.Tensor
    """(B, T, text width) CLIP's hidden states."""


def build_unet() -> UNet2DConditionModel:
    """An untrained inpainting UNet for 128 x 128 pictures: stacks of one block on 32 x 32 and 16 x
    16 latents, and in the middle on 8 x 8.
    """
    return UNet2DConditionModel(
        sample_size=32,
        in_channels=2 * LATENT_CHANNELS + 1,
        out_channels=LATENT_CHANNELS,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(32, 64, 96),
        layers_per_block=1,
        norm_num_groups=4,  # 8 channels and more a group, as in the true models
        cross_attention_dim=WIDTH,
        attention_head_dim=(1, 2, 3),  # these are numbers of heads, as in Stable Diffusion 2
        use_linear_projection=True,
    )


def build_sampler() -> DDIMScheduler:
    """Stable Diffusion 2.1's own: scaled-linear betas, v-prediction."""
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
        prediction_type="v_prediction",
    )


@torch.no_grad()
def narrow_vae(vae: AutoencoderKL) -> AutoencoderKL:
    """`vae` with only its first four latent channels, for pipelines without a shift.

    The channels are principal components, the strongest first, so the encoder is final. The decoder
    begins as the wide VAE's, with the lost channels at their mean.
    """
    narrow = build_vae(LATENT_CHANNELS, int(vae.config.sample_size))
    state = vae.decoder.state_dict()
    state["conv_in.weight"] = state["conv_in.weight"][:, :LATENT_CHANNELS]
    narrow.decoder.load_state_dict(state)
    noise = torch.rand(2, 3, 64, 64) * 2 - 1
    wide, cut = (v.encode(noise).latent_dist.mode() for v in (vae, narrow))
    error = float((wide[:, :LATENT_CHANNELS] - cut).abs().max())
    if error > 0.05:
        raise ValueError(f"vae: its first channels are not the strongest ones (error {error:.3f})")
    narrow.register_to_config(shift_factor=None)
    return narrow


def loss_of(
    model: nn.Module,
    batch: Batch,
    sampler: DDIMScheduler,
    generator: torch.Generator,
    *,
    base: bool = False,
) -> torch.Tensor:
    """v-prediction loss, mostly of the masked region. A `base` model gets no mask; its loss covers
    the whole picture.
    """
    clean, count = batch.clean, len(batch.clean)
    times = (sample_times(count, generator) * 1000).long().clamp_max(999)
    noise = torch.randn(clean.shape, generator=generator)
    mixed = sampler.add_noise(clean, noise, times)
    inputs = mixed if base else torch.cat([mixed, batch.mask, batch.masked], dim=1)
    with torch.autocast("cpu", torch.bfloat16):
        answer = model(inputs, times, batch.prompt, return_dict=False)[0]
    error = (answer.float() - sampler.get_velocity(clean, noise, times)).square().mean(dim=1)
    if base:
        return error.mean()
    weight = OUTSIDE_WEIGHT + (1 - OUTSIDE_WEIGHT) * batch.mask[:, 0]
    return (error * weight).sum() / weight.sum()
