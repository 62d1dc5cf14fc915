"""What Qwen-Image takes of a prompt: a Qwen2.5-VL's last states, its template's words apart."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from maskserve_core.config import Config
from maskserve_engine.base.job import Conditioning
from maskserve_engine.families.encoder import OneTextEncoder, TextEncoder, to_numpy
from maskserve_engine.stages.encoded import TokensRead


@lru_cache(maxsize=1)
def _pipeline_of(model: Any, tokenizer: Any) -> Any:
    """The pipeline that knows the template and reads prompts; it has no other parts."""
    from diffusers import QwenImageInpaintPipeline

    return QwenImageInpaintPipeline(
        scheduler=None, vae=None, text_encoder=model, tokenizer=tokenizer, transformer=None
    )


class _TemplateEncoder(TextEncoder):
    """Whose prompts stand in the pipeline's template."""

    @property
    def pipeline(self) -> Any:
        return _pipeline_of(self.model, self.tokenizer)

    def read_of(self, prompt: str) -> TokensRead:
        own = self.pipeline
        said = self.tokenizer(own.prompt_template_encode.format(prompt), verbose=False)
        words = len(said.input_ids) - own.prompt_template_encode_start_idx
        used = min(words, self.length)
        return TokensRead(used, words - used)


class QwenImageEncoder(OneTextEncoder):
    """VAE encoder and text encoder of a Qwen-Image folder: a Qwen2.5-VL."""

    text: _TemplateEncoder

    @staticmethod
    def load_text(config: Config, length: int) -> TextEncoder:
        from transformers import Qwen2_5_VLForConditionalGeneration

        return _TemplateEncoder.load(config, Qwen2_5_VLForConditionalGeneration, length=length)

    def encode_prompts(self, prompts: Sequence[str]) -> list[Conditioning]:
        """`prompt_embeds` [T, width] of each prompt, as long as it is."""
        with torch.inference_mode():
            states, mask = self.text.pipeline.encode_prompt(
                list(prompts), max_sequence_length=self.text.length
            )
        lengths = [states.shape[1]] * len(states) if mask is None else mask.sum(1).tolist()
        return [
            {"prompt_embeds": each[: int(length)].copy()}
            for each, length in zip(to_numpy(states), lengths, strict=True)
        ]
