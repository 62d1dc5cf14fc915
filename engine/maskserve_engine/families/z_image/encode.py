"""Encoder of Z-Image: a Qwen3's states before its last layer, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from maskserve_common.config import Config
from maskserve_engine.base.job import Conditioning
from maskserve_engine.families.encoder import ChatEncoder, OneTextEncoder, TextEncoder, to_numpy
from maskserve_engine.spec.model_spec import ModelSpec


@lru_cache(maxsize=1)
def _pipeline_of(model: Any, tokenizer: Any) -> Any:
    """Return a pipeline for reading prompts, without other parts."""
    from diffusers import ZImageInpaintPipeline

    return ZImageInpaintPipeline(
        scheduler=None, vae=None, text_encoder=model, tokenizer=tokenizer, transformer=None
    )


class _ThinkingEncoder(ChatEncoder):
    thinking = True


class ZImageEncoder(OneTextEncoder):
    """VAE encoder and text encoder of a Z-Image folder."""

    @staticmethod
    def load_text(spec: ModelSpec, config: Config) -> TextEncoder:
        from transformers import Qwen3Model

        return _ThinkingEncoder.load(config, Qwen3Model, length=config.model.max_sequence_length)

    def encode_prompts(self, prompts: Sequence[str]) -> list[Conditioning]:
        """Return `prompt_embeds` [words, width] of each prompt, without padding."""
        pipeline = _pipeline_of(self.text.model, self.text.tokenizer)
        with torch.inference_mode():
            states = pipeline._encode_prompt(list(prompts), max_sequence_length=self.text.length)
        return [{"prompt_embeds": to_numpy(prompt_states).copy()} for prompt_states in states]
