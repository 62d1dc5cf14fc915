"""Encoder of Chroma: T5 states up to the first padding token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from maskserve_common.config import Config
from maskserve_engine.base.job import Conditioning
from maskserve_engine.families.encoder import OneTextEncoder, TextEncoder, to_numpy
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_engine.stages.quantise import load_t5


@lru_cache(maxsize=1)
def _pipeline_of(model: Any, tokenizer: Any) -> Any:
    """Return a pipeline for reading prompts, without other parts."""
    from diffusers import ChromaInpaintPipeline

    return ChromaInpaintPipeline(
        scheduler=None, vae=None, text_encoder=model, tokenizer=tokenizer, transformer=None
    )


class ChromaEncoder(OneTextEncoder):
    """VAE encoder and text encoder of a Chroma folder.

    The model was trained to see the prompt and one padding token. The pipeline also intends to drop
    the rest, but its mask holds numbers that attention adds, so it drops nothing.
    """

    @staticmethod
    def load_text(spec: ModelSpec, config: Config) -> TextEncoder:
        from transformers import T5EncoderModel

        length = config.model.max_sequence_length
        return TextEncoder.load(config, T5EncoderModel, length=length, load=load_t5)

    def encode_prompts(self, prompts: Sequence[str]) -> list[Conditioning]:
        """Return `prompt_embeds` [T, width] of each prompt, without padding."""
        pipeline = _pipeline_of(self.text.model, self.text.tokenizer)
        with torch.inference_mode():
            states, _, mask, *_ = pipeline.encode_prompt(
                list(prompts),
                do_classifier_free_guidance=False,
                max_sequence_length=self.text.length,
            )
        lengths = mask.sum(1).tolist()
        return [
            {"prompt_embeds": states_of_prompt[: int(length)].copy()}
            for states_of_prompt, length in zip(to_numpy(states), lengths, strict=True)
        ]
