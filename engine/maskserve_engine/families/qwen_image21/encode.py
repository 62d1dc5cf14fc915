"""Encoder of Qwen-Image-2.1: a Qwen3-VL's states of the words round the source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from maskserve_common.config import Config
from maskserve_engine.base.job import Conditioning
from maskserve_engine.families.encoder import OneTextEncoder, TextEncoder, to_numpy
from maskserve_engine.families.mmdit.preparation import before
from maskserve_engine.families.qwen_image.encode import check_prompt, picture_processor
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_engine.stages.encoded import TokensRead
from maskserve_engine.stages.loader import load_plain


@dataclass(frozen=True, slots=True)
class _SentenceEncoder(TextEncoder):
    """A text encoder that puts prompts after a picture, in its pipeline's template."""

    pipeline: Any
    """The pipeline, which has the template and reads prompts; it has no other parts."""

    def read_of(self, prompt: str) -> TokensRead:
        """Return the token counts after the picture."""
        pipeline = self.pipeline
        input_ids = self.tokenizer(
            pipeline.prompt_template_ti2i.format(prompt), verbose=False
        ).input_ids
        words = len(input_ids) - input_ids.index(pipeline._img_token_id) - 1
        used = min(words, self.length)
        return TokensRead(used, words - used)


class QwenImage21Encoder(OneTextEncoder):
    """VAE encoder and text encoder of a Qwen-Image-2.1 folder: a Qwen3-VL."""

    text: _SentenceEncoder

    @staticmethod
    def load_text(spec: ModelSpec, config: Config) -> TextEncoder:
        from diffusers import QwenImage21Pipeline
        from transformers import (
            Qwen2VLImageProcessorPil,
            Qwen3VLForConditionalGeneration,
            Qwen3VLProcessor,
        )

        text = TextEncoder.load(
            config,
            Qwen3VLForConditionalGeneration,
            length=config.model.max_sequence_length,
            tokenizer="processor",
        )
        pictures = load_plain(config, "processor", Qwen2VLImageProcessorPil)
        pictures.do_resize = False  # sides are multiples of its cells
        processor = picture_processor(Qwen3VLProcessor, pictures, text.tokenizer)
        pipeline = QwenImage21Pipeline(
            scheduler=None, vae=None, transformer=None, text_encoder=text.model,
            processor=processor,
        )  # fmt: skip
        return _SentenceEncoder(text.tokenizer, text.model, text.length, pipeline)

    def encode_prompts(self, prompts: Sequence[str]) -> list[Conditioning]:
        raise AssertionError("each prompt is about a picture")

    def encode_prompt(
        self, prompt: str, pictures: Sequence[NDArray[np.uint8]] = ()
    ) -> Conditioning:
        """Return `prompt_embeds` [T, width] of the words after the pictures, and the states of
        those before each; without a picture, of all words. Long prompts are cut, unlike in the
        pipeline.
        """
        check_prompt(prompt)
        if not pictures:
            with torch.inference_mode():
                [states], _, _ = self.text.pipeline.encode_prompt(prompt)
            used_tokens = len(states) - self.text.read_of(prompt).cut
            return {"prompt_embeds": to_numpy(states[:used_tokens])}
        with torch.inference_mode():
            [states], _, [slots] = self.text.pipeline.encode_prompt(
                prompt, [Image.fromarray(pixels) for pixels in pictures]
            )
        edges = torch.diff(slots.int(), prepend=slots.new_zeros(1).int()).nonzero().flatten()
        first, *rest = edges.tolist()  # pictures' first slots, and the words' behind them
        places = [0, first, *rest]
        words = [
            to_numpy(states[begin:end])
            for begin, end in zip(places[::2], places[1::2], strict=False)
        ]
        last = to_numpy(states[places[-1] : places[-1] + self.text.length])
        return {
            "prompt_embeds": last,
            **{before(number): of_one for number, of_one in enumerate(words)},
        }
