"""Encoder of JoyImage-Edit: states of a Qwen3-VL before its last norm, which sees the source before
the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from maskserve_common.config import Config
from maskserve_engine.base.job import Conditioning
from maskserve_engine.families.encoder import TextEncoder, to_numpy
from maskserve_engine.families.qwen_image.encode import (
    QwenImageEditEncoder,
    TemplateEncoder,
    check_prompt,
    picture_processor,
)
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_engine.stages.encoded import TokensRead
from maskserve_engine.stages.loader import load_plain

_TEMPLATE = "multiple_images"
_TURN = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{}<|im_end|>\n"


@dataclass(frozen=True, slots=True)
class _TurnEncoder(TemplateEncoder):
    """A text encoder that reads a picture and a prompt as one turn of a conversation."""

    def read_of(self, prompt: str) -> TokensRead:
        template = self.pipeline.prompt_template_encode[_TEMPLATE].format(_TURN.format(prompt))
        words = len(self.tokenizer(template, verbose=False).input_ids) - 1  # the picture's
        words -= self.pipeline.prompt_template_encode_start_idx[_TEMPLATE]
        used = min(words, self.length)
        return TokensRead(used, words - used)


class JoyImageEncoder(QwenImageEditEncoder):
    """VAE encoder and text encoder of a JoyImage-Edit folder: a Qwen3-VL."""

    @staticmethod
    def load_text(spec: ModelSpec, config: Config) -> TextEncoder:
        from diffusers import JoyImageEditPipeline
        from transformers import (
            Qwen2VLImageProcessorPil,
            Qwen3VLForConditionalGeneration,
            Qwen3VLProcessor,
        )

        length = config.model.max_sequence_length
        text = TextEncoder.load(config, Qwen3VLForConditionalGeneration, length=length)
        pictures = load_plain(config, "processor", Qwen2VLImageProcessorPil)
        processor = picture_processor(Qwen3VLProcessor, pictures, text.tokenizer)
        return _TurnEncoder.of(text, JoyImageEditPipeline, processor=processor)

    def encode_prompt(
        self, prompt: str, pictures: Sequence[NDArray[np.uint8]] = ()
    ) -> Conditioning:
        """Return `prompt_embeds` [picture + T, width]. Long prompts are cut at their ends, unlike
        in the pipeline.
        """
        check_prompt(prompt)
        [pixels] = pictures
        with torch.inference_mode():
            [states], _ = self.text.pipeline.encode_prompt_multiple_images(
                prompt, images=[self.resized(pixels)], device=self.text.model.device
            )
        used_tokens = len(states) - self.text.read_of(prompt).cut
        return {"prompt_embeds": to_numpy(states[:used_tokens])}
