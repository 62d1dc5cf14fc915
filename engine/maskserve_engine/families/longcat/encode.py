"""Encoder of LongCat-Image and LongCat-Image-Edit: last states of a Qwen2.5-VL, which reads quoted
text letter by letter. The edit model shows it the source before the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from maskserve_common.config import Config
from maskserve_engine.base.job import Conditioning
from maskserve_engine.families.encoder import OneTextEncoder, TextEncoder, to_numpy
from maskserve_engine.families.qwen_image.encode import (
    QwenImageEditEncoder,
    TemplateEncoder,
    check_prompt,
    picture_processor,
    text_of,
)
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_engine.stages.encoded import TokensRead
from maskserve_engine.stages.loader import load_plain

_CONTRACTION = re.compile(r"[a-zA-Z]+'[a-zA-Z]+")
"""A word with an apostrophe, which is no quotation mark."""
_APOSTROPHE = "\0"
"""A letter that stands for such an apostrophe."""
_BEGIN, _PLACE = "<|vision_start|>", "<|image_pad|>"
"""Tokens before a picture, and in its place."""


@dataclass(frozen=True, slots=True)
class _QuotationEncoder(TemplateEncoder):
    """A text encoder that reads quoted text letter by letter, in its pipeline's template."""

    def read_of(self, prompt: str) -> TokensRead:
        whole = len(self.words(prompt))
        used = min(whole, self.length)
        return TokensRead(used, whole - used)

    def words(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt, however many. The pipeline exchanges words with
        apostrophes where a prompt has two of them.
        """
        from diffusers.pipelines.longcat_image.pipeline_longcat_image import split_quotation

        marked = _CONTRACTION.sub(lambda word: word[0].replace("'", _APOSTROPHE), prompt)
        pieces: list[str] = []
        for part, is_quoted in split_quotation(marked):
            part = part.replace(_APOSTROPHE, "'")
            pieces += part if is_quoted else [part]
        return [token for piece in pieces for token in self.tokens(piece)]

    def tokens(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return tokens

    def read(
        self, prompts: Sequence[str], before: list[int], source: list[int], **picture: Tensor
    ) -> Tensor:
        """Return [prompts, S + length, width] states of the tokens of a `source` [S] and of each
        prompt, cut or padded, behind the tokens `before`; `picture` are the source's pixels.
        """
        before = before + source
        after = self.tokens(self.pipeline.prompt_template_encode_suffix)
        words = self.tokenizer.pad(
            {"input_ids": [self.words(prompt)[: self.length] for prompt in prompts]},
            max_length=self.length,
            padding="max_length",
            return_attention_mask=True,
            return_tensors="pt",
        )
        edges = [torch.tensor([tokens]).expand(len(prompts), -1) for tokens in (before, after)]
        inputs = {
            "input_ids": torch.cat((edges[0], words.input_ids, edges[1]), dim=1),
            "attention_mask": F.pad(words.attention_mask, (len(before), len(after)), value=1),
            **picture,
        }
        device = self.model.device
        answer = self.model.model(**{name: tensor.to(device) for name, tensor in inputs.items()})
        states: Tensor = answer.last_hidden_state[:, len(before) - len(source) : -len(after)]
        return states


class LongCatEncoder(OneTextEncoder):
    """VAE encoder and text encoder of a LongCat-Image folder: a Qwen2.5-VL."""

    text: _QuotationEncoder

    @staticmethod
    def load_text(spec: ModelSpec, config: Config) -> TextEncoder:
        from diffusers import LongCatImagePipeline

        return _QuotationEncoder.of(text_of(config), LongCatImagePipeline, text_processor=None)

    def encode_prompts(self, prompts: Sequence[str]) -> list[Conditioning]:
        """Return `prompt_embeds` [length, width] of each prompt, with its padding."""
        before = self.text.tokens(self.text.pipeline.prompt_template_encode_prefix)
        with torch.inference_mode():
            states = to_numpy(self.text.read(prompts, before, []))
        return [{"prompt_embeds": of_prompt.copy()} for of_prompt in states]


class LongCatEditEncoder(QwenImageEditEncoder):
    """Encoder of a LongCat-Image-Edit folder, whose prompts are about the source."""

    text: _QuotationEncoder

    @staticmethod
    def load_text(spec: ModelSpec, config: Config) -> TextEncoder:
        from diffusers import LongCatImageEditPipeline
        from transformers import Qwen2VLImageProcessorPil, Qwen2VLProcessor

        text = text_of(config)
        pictures = load_plain(config, "text_processor", Qwen2VLImageProcessorPil)
        processor = picture_processor(Qwen2VLProcessor, pictures, text.tokenizer)
        return _QuotationEncoder.of(text, LongCatImageEditPipeline, text_processor=processor)

    def encode_prompt(
        self, prompt: str, pictures: Sequence[NDArray[np.uint8]] = ()
    ) -> Conditioning:
        """Return `prompt_embeds` [picture + 2 + length, width]: the source between two marks, then
        the prompt with its padding.
        """
        check_prompt(prompt)
        [pixels], text = pictures, self.text
        processor: Any = text.pipeline.image_processor_vl
        picture = processor(images=self.resized(pixels), return_tensors="pt")
        count = int(picture["image_grid_thw"].prod()) // processor.merge_size**2
        template = text.pipeline.prompt_template_encode_prefix
        before = text.tokens(template.replace(_PLACE, count * _PLACE))
        first = before.index(text.tokenizer.convert_tokens_to_ids(_BEGIN))
        with torch.inference_mode():
            [states] = text.read([prompt], before[:first], before[first:], **picture)
        return {"prompt_embeds": to_numpy(states)}
