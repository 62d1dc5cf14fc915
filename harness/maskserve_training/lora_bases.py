"""The demo models, as a LoRA learns on them and as diffusers' own pipelines run them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final, Protocol

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxFillPipeline, StableDiffusionInpaintPipeline
from diffusers.models.attention_processor import AttnProcessor

from maskserve_harness.checkout import DEMO_MODEL
from maskserve_harness.demo_model.evaluation import run_edits
from maskserve_harness.demo_model.prompts import MAX_SEQUENCE_LENGTH
from maskserve_harness.demo_model.scenes import Edit, Picture
from maskserve_training import transformer, unet
from maskserve_training.attention import MatmulAttention
from maskserve_training.data import encode
from maskserve_training.export import STEPS
from maskserve_training.unet_command import GUIDANCE
from maskserve_training.vae import to_tensor


class Base(Protocol):
    """A demo model in its diffusers pipeline."""

    pipe: Any
    denoiser: Any
    """The module that the adapter belongs to."""
    targets: str
    """Names of the layers that learn, as a regular expression."""
    save_as: str
    """The argument of the pipeline's `save_lora_weights` that takes the denoiser's factors."""

    def ready_to_learn(self) -> None:
        """Attention that is quick backwards on CPUs."""

    def loss(self, samples: list[Edit], generator: torch.Generator) -> torch.Tensor:
        """The base's own training loss on edits of one picture size."""

    def edit(self, edits: list[Edit]) -> list[Picture]:
        """The edits by diffusers' own pipeline."""


class FluxBase:
    """The demo model; a LoRA learns on every linear layer of every block."""

    targets = (
        r".*transformer_blocks\.\d+\.(attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"
        r"|ff(_context)?\.net\.(0\.proj|2)|proj_mlp|proj_out)"
    )
    save_as = "transformer_lora_layers"

    def __init__(self) -> None:
        self.pipe = FluxFillPipeline.from_pretrained(DEMO_MODEL)
        self.denoiser = self.pipe.transformer
        self._texts = cache(torch.no_grad()(self._encode))

    def ready_to_learn(self) -> None:
        """`Base.ready_to_learn`."""
        self.denoiser.set_attn_processor(MatmulAttention())

    def loss(self, samples: list[Edit], generator: torch.Generator) -> torch.Tensor:
        """`Base.loss`."""
        batch = self.batch(samples)
        active = batch.condition[..., batch.clean.shape[2] :].amax(dim=2)
        return transformer.loss_of(self.denoiser, batch, active, generator)

    @torch.no_grad()
    def batch(self, samples: list[Edit]) -> transformer.Batch:
        """Edits of one picture size as FLUX takes them."""
        vae, factor = self.pipe.vae, self.pipe.vae_scale_factor
        clean, seen, mask = (
            transformer.pack(x) if x.ndim == 4 else transformer.pack_mask(x, factor)
            for x in _latents(vae, samples)
        )
        texts = [self._texts(sample.prompt) for sample in samples]
        height, width = samples[0].mask.shape
        rows, columns = height // factor // 2, width // factor // 2
        ids = torch.zeros(rows, columns, 3)
        ids[..., 1], ids[..., 2] = torch.arange(rows)[:, None], torch.arange(columns)[None]
        none = torch.full((len(samples), 2), -1)
        return transformer.Batch(
            clean=clean,
            condition=torch.cat([seen, mask], dim=2),
            prompt=torch.stack([states for states, _ in texts]),
            pooled=torch.stack([pooled for _, pooled in texts]),
            ids=ids.view(-1, 3),
            shown=none,
            seen=none[:, None].expand(-1, rows * columns, -1),
        )

    def edit(self, edits: list[Edit]) -> list[Picture]:
        """`Base.edit`."""
        return run_edits(self.pipe, edits, STEPS, 8, lambda *_: None)

    def _encode(self, prompt: str) -> tuple[torch.Tensor, torch.Tensor]:
        """T5 states (T, width) and pooled output (width,)."""
        states, pooled, _ = self.pipe.encode_prompt(
            prompt=prompt, prompt_2=None, max_sequence_length=MAX_SEQUENCE_LENGTH
        )
        return states[0], pooled[0]


class UnetBase:
    """The demo UNet; a LoRA learns on attention, feed-forward layers and resnets' convolutions."""

    targets = r".*(attn[12]\.(to_[qkv]|to_out\.0)|ff\.net\.(0\.proj|2)|resnets\.\d+\.conv[12])"
    save_as = "unet_lora_layers"

    def __init__(self) -> None:
        self.pipe = StableDiffusionInpaintPipeline.from_pretrained(
            DEMO_MODEL.with_name("demo-unet"), safety_checker=None
        )
        self.denoiser = self.pipe.unet
        self._texts = cache(torch.no_grad()(self._encode))

    def ready_to_learn(self) -> None:
        """`Base.ready_to_learn`."""
        self.denoiser.set_attn_processor(AttnProcessor())

    def loss(self, samples: list[Edit], generator: torch.Generator) -> torch.Tensor:
        """`Base.loss`."""
        batch = self.batch(samples)
        return unet.loss_of(self.denoiser, batch, self.pipe.scheduler, generator)

    @torch.no_grad()
    def batch(self, samples: list[Edit]) -> unet.Batch:
        """Edits of one picture size as the UNet takes them."""
        clean, seen, mask = _latents(self.pipe.vae, samples)
        small = mask[:, None, :: self.pipe.vae_scale_factor, :: self.pipe.vae_scale_factor]
        prompt = torch.stack([self._texts(sample.prompt) for sample in samples])
        return unet.Batch(clean, seen, small, prompt)

    def edit(self, edits: list[Edit]) -> list[Picture]:
        """`Base.edit`."""
        return run_edits(self.pipe, edits, STEPS, 8, lambda *_: None, guidance_scale=GUIDANCE)

    def _encode(self, prompt: str) -> torch.Tensor:
        """CLIP's states (T, width)."""
        return self.pipe.encode_prompt(prompt, "cpu", 1, do_classifier_free_guidance=False)[0][0]


BASES: Final[dict[str, Callable[[], Base]]] = {"flux": FluxBase, "unet": UnetBase}


def _latents(
    vae: AutoencoderKL, samples: list[Edit]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The answers' and masked sources' normalised latents (B, C, h, w), and masks (B, H, W)."""
    mask = torch.from_numpy(np.stack([sample.mask for sample in samples]).astype(np.float32))
    hidden = to_tensor([sample.source for sample in samples]) * (1 - mask[:, None])
    answers = to_tensor([sample.target for sample in samples])
    return encode(vae, answers), encode(vae, hidden), mask
