"""Encoder of FLUX: T5's states and CLIP's pooled vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from maskserve_common.config import Config
from maskserve_engine.base.job import Conditioning
from maskserve_engine.families.encoder import Encoder, TextEncoder, to_numpy
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_engine.stages.cpu_threads import limit_threads
from maskserve_engine.stages.quantise import load_t5
from maskserve_engine.stages.vae import load_vae


class FluxEncoder(Encoder):
    """VAE encoder and the two text encoders of a FLUX folder."""

    def __init__(self, spec: ModelSpec, vae: Any, clip: TextEncoder, t5: TextEncoder) -> None:
        super().__init__(spec, vae)
        self.clip, self.t5 = clip, t5

    @classmethod
    def load(cls, spec: ModelSpec, config: Config) -> FluxEncoder:
        """Load the parts of a model folder. Raises ConfigError if a part cannot be loaded."""
        from transformers import CLIPTextModel, T5EncoderModel

        limit_threads(config)
        vae, clip = load_vae(config, spec), TextEncoder.load(config, CLIPTextModel)
        length = config.model.max_sequence_length
        t5 = TextEncoder.load(config, T5EncoderModel, "_2", length, load=load_t5)
        return cls(spec, vae, clip, t5.recorded() if config.engine.cuda_graphs else t5)

    @property
    def text_encoders(self) -> dict[str, TextEncoder]:
        return {"text_encoder": self.clip, "text_encoder_2": self.t5}

    def encode_prompts(self, prompts: Sequence[str]) -> list[Conditioning]:
        """Return `prompt_embeds` [T, width] and `pooled` [width] of each prompt."""
        with torch.inference_mode():
            states = to_numpy(self.t5.states(prompts))
            pooled = to_numpy(self.clip(prompts).pooler_output)
        return [
            {"prompt_embeds": states[i].copy(), "pooled": pooled[i].copy()}
            for i in range(len(prompts))
        ]
