"""Encoder of Stable Diffusion 3.5: states of two CLIPs and a T5, and two pooled vectors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from maskserve_common.config import Config
from maskserve_engine.base.job import Conditioning
from maskserve_engine.families.encoder import Encoder, TextEncoder, to_numpy
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_engine.stages.cpu_threads import limit_threads
from maskserve_engine.stages.quantise import load_t5
from maskserve_engine.stages.vae import load_vae


class Sd3Encoder(Encoder):
    """VAE encoder and the three text encoders, two CLIPs and a T5, of a Stable Diffusion 3.5
    folder.
    """

    def __init__(self, spec: ModelSpec, vae: Any, texts: Sequence[TextEncoder]) -> None:
        super().__init__(spec, vae)
        self._texts = texts

    @classmethod
    def load(cls, spec: ModelSpec, config: Config) -> Sd3Encoder:
        """Load the parts of a model folder. Raises ConfigError if a part cannot be loaded."""
        from transformers import CLIPTextModelWithProjection, T5EncoderModel

        limit_threads(config)
        clips = [TextEncoder.load(config, CLIPTextModelWithProjection, n) for n in ("", "_2")]
        length = config.model.max_sequence_length
        t5 = TextEncoder.load(config, T5EncoderModel, "_3", length, load=load_t5)
        return cls(spec, load_vae(config, spec), (*clips, t5))

    @property
    def text_encoders(self) -> dict[str, TextEncoder]:
        names = ("text_encoder", "text_encoder_2", "text_encoder_3")
        return dict(zip(names, self._texts, strict=True))

    @cached_property
    def _pipeline(self) -> Any:
        from diffusers import StableDiffusion3InpaintPipeline

        parts = {name: encoder.model for name, encoder in self.text_encoders.items()}
        parts |= {
            name.replace("text_encoder", "tokenizer"): encoder.tokenizer
            for name, encoder in self.text_encoders.items()
        }
        return StableDiffusion3InpaintPipeline(transformer=None, scheduler=None, vae=None, **parts)

    def encode_prompts(self, prompts: Sequence[str]) -> list[Conditioning]:
        """Return `prompt_embeds` [T, width] and `pooled` [width] of each prompt, with padding
        tokens.
        """
        with torch.inference_mode():
            states, _, pooled, _ = self._pipeline.encode_prompt(
                list(prompts),
                None,
                None,
                do_classifier_free_guidance=False,
                max_sequence_length=self._texts[-1].length,
            )
        return [
            {"prompt_embeds": prompt_states.copy(), "pooled": vector.copy()}
            for prompt_states, vector in zip(to_numpy(states), to_numpy(pooled), strict=True)
        ]
