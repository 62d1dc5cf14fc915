"""Encoder of FLUX.3 klein: the states of eight layers of a Qwen3-VL."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch

from maskserve_common.config import Config
from maskserve_engine.base.job import Conditioning
from maskserve_engine.families.encoder import ChatEncoder, OneTextEncoder, TextEncoder, to_numpy
from maskserve_engine.spec.model_spec import ModelSpec


class Flux3Encoder(OneTextEncoder):
    """VAE encoder and text encoder of a FLUX.3 klein folder."""

    @staticmethod
    def load_text(spec: ModelSpec, config: Config) -> TextEncoder:
        from transformers import Qwen3VLForConditionalGeneration

        return ChatEncoder.load(
            config, Qwen3VLForConditionalGeneration, length=config.model.max_sequence_length
        )

    def encode_prompts(self, prompts: Sequence[str]) -> list[Conditioning]:
        """Return `prompt_embeds` [T, 8 · width] of each prompt as it is, with padding tokens."""
        from diffusers.modular_pipelines.flux3.encoders import Flux3TextEncoderStep

        text = self.text
        processor = SimpleNamespace(
            tokenizer=text.tokenizer, apply_chat_template=text.tokenizer.apply_chat_template
        )
        with torch.inference_mode():
            states = [
                Flux3TextEncoderStep._get_qwen3_vl_prompt_embeds(
                    text.model, processor, prompt, max_sequence_length=text.length
                )
                for prompt in prompts
            ]
        return [{"prompt_embeds": to_numpy(state[0])} for state in states]
