"""VAE and text encoders of UNet models: CLIP's hidden states, and SDXL's pooled vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from maskserve_common.config import Config
from maskserve_engine.base.job import Conditioning
from maskserve_engine.families.encoder import Encoder, TextEncoder, to_numpy
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_engine.stages.cpu_threads import limit_threads
from maskserve_engine.stages.vae import load_vae


class UnetEncoder(Encoder):
    """VAE encoder and the text encoders, one or (SDXL) two, of a Stable Diffusion folder."""

    def __init__(self, spec: ModelSpec, vae: Any, encoders: Sequence[TextEncoder]) -> None:
        super().__init__(spec, vae)
        self.encoders = tuple(encoders)

    @classmethod
    def load(cls, spec: ModelSpec, config: Config) -> UnetEncoder:
        from transformers import CLIPTextModel, CLIPTextModelWithProjection

        limit_threads(config)
        vae = load_vae(config, spec)
        encoders = [TextEncoder.load(config, CLIPTextModel)]
        if spec.micro_conditioning:
            encoders.append(TextEncoder.load(config, CLIPTextModelWithProjection, "_2"))
        return cls(spec, vae, encoders)

    @property
    def text_encoders(self) -> dict[str, TextEncoder]:
        return dict(zip(("text_encoder", "text_encoder_2"), self.encoders, strict=False))

    def encode_prompts(self, prompts: Sequence[str]) -> list[Conditioning]:
        """Return `prompt_embeds` [T, width] and, for SDXL, `pooled` [width] of each prompt."""
        xl = self.spec.micro_conditioning
        with torch.inference_mode():
            answers = [encoder(prompts, hidden_states=xl) for encoder in self.encoders]
            if not xl:
                states = to_numpy(answers[0].last_hidden_state)
                return [{"prompt_embeds": prompt_states.copy()} for prompt_states in states]
            # SDXL reads the layer before the last of both, and the second one's projection.
            states = to_numpy(torch.cat([answer.hidden_states[-2] for answer in answers], dim=2))
            pooled = to_numpy(answers[1].text_embeds)
        return [
            {"prompt_embeds": states[i].copy(), "pooled": pooled[i].copy()}
            for i in range(len(prompts))
        ]

    def as_negative(self, prompt: str, encoded: Conditioning) -> Conditioning:
        """Replace an empty negative prompt by zeros, as SDXL base was trained."""
        if not prompt and self.spec.zeros_for_empty_prompt:
            return {name: np.zeros_like(array) for name, array in encoded.items()}
        return encoded
