"""The demo model's FLUX transformer: its construction, its inputs, and one training step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxFillPipeline, FluxTransformer2DModel
from torch import nn

from maskserve_studies.training import muon
from maskserve_studies.training.text import WIDTH

HEAD_DIM: Final = 32
_AXES: Final = (8, 12, 12)  # rotary dimensions of (unused, row, column) in HEAD_DIM
OUTSIDE_WEIGHT: Final = 0.1  # weight of the loss on tokens that no masked pixel touches


@dataclass(frozen=True)
class Batch:
    """Edits of one token grid, packed like FluxFillPipeline's."""

    clean: torch.Tensor
    """(B, N, 4 C) latents of the right answer, normalised."""
    condition: torch.Tensor
    """(B, N, 4 C + 4 factor²) latents of the masked source, normalised, then mask pixels 0/1."""
    prompt: torch.Tensor
    """(B, T, text width) T5 states."""
    pooled: torch.Tensor
    """(B, pooled width) CLIP output."""
    ids: torch.Tensor
    """(N, 3) image ids: 0, row, column."""

    @property
    def text_ids(self) -> torch.Tensor:
        """(T, 3): all zeros, as in FLUX."""
        return torch.zeros(self.prompt.shape[1], 3)


@dataclass(frozen=True)
class HintedBatch(Batch):
    """Drawn edits with labels of their objects."""

    answer_object: torch.Tensor
    """(B, 2) colour and shape number of the answer's object, -1 without one."""
    token_objects: torch.Tensor
    """(B, N, 2): colour and shape number of another object at its tokens, -1 elsewhere."""


def build_transformer(
    latent_channels: int,
    factor: int,
    heads: int,
    layers: int,
    single_layers: int,
    head_dim: int = HEAD_DIM,
) -> FluxTransformer2DModel:
    """An untrained FLUX Fill transformer, heads * head_dim wide; head_dim is HEAD_DIM or a
    multiple.
    """
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=8 * latent_channels + 4 * factor**2,
        out_channels=4 * latent_channels,
        num_layers=layers,
        num_single_layers=single_layers,
        attention_head_dim=head_dim,
        num_attention_heads=heads,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=False,
        axes_dims_rope=tuple(axis * head_dim // HEAD_DIM for axis in _AXES),
    )


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """FLUX's own schedule, whose shift follows the number of image tokens."""
    return FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000,
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )


def pack(latents: torch.Tensor) -> torch.Tensor:
    """(B, C, H, W) latents or mask planes as (B, H/2 * W/2, 4 C) tokens."""
    b, c, h, w = latents.shape
    return FluxFillPipeline._pack_latents(latents, b, c, h, w)


def pack_mask(mask: torch.Tensor, factor: int) -> torch.Tensor:
    """(B, H, W) pixels as (B, N, 4 factor²) tokens, in FluxFillPipeline's order."""
    b, height, width = mask.shape
    h, w = height // factor, width // factor
    planes = mask.view(b, h, factor, w, factor).permute(0, 2, 4, 1, 3)
    return pack(planes.reshape(b, factor * factor, h, w))


def sample_times(count: int, generator: torch.Generator, lateness: float = 1.8) -> torch.Tensor:
    """Times (B,) in 0..1. Some are even. Most are near 1, where the shape is decided, around
    sigmoid(`lateness`).
    """
    even = torch.rand(count, generator=generator)
    late = torch.sigmoid(lateness + torch.randn(count, generator=generator))
    return torch.where(torch.rand(count, generator=generator) < 0.3, even, late)


def loss_of(
    model: nn.Module,
    batch: Batch,
    active: torch.Tensor,
    generator: torch.Generator,
    lateness: float = 1.8,
) -> torch.Tensor:
    """Flow-matching loss. The velocity is noise minus clean latents; the time is the noise's share.

    `active` (B, N) is 1 where a masked pixel touches a token; `lateness` is that of `sample_times`.
    """
    clean = batch.clean
    time = sample_times(len(clean), generator, lateness)
    noise = torch.randn(clean.shape, generator=generator)
    mixed = clean + time[:, None, None] * (noise - clean)
    with torch.autocast("cpu", torch.bfloat16):
        velocity = model(
            hidden_states=torch.cat([mixed, batch.condition], dim=2),
            timestep=time,
            pooled_projections=batch.pooled,
            encoder_hidden_states=batch.prompt,
            txt_ids=batch.text_ids,
            img_ids=batch.ids,
            return_dict=False,
        )[0]
    weight = OUTSIDE_WEIGHT + (1 - OUTSIDE_WEIGHT) * active
    error = (velocity.float() - (noise - clean)).square().mean(dim=2)
    return (error * weight).sum() / weight.sum()


def optimisers(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside blocks, AdamW for the other parameters."""
    matrices = [
        parameter
        for name, parameter in model.named_parameters()
        if "transformer_blocks" in name and parameter.ndim == 2
    ]
    return muon.optimisers(model, matrices, rate)
