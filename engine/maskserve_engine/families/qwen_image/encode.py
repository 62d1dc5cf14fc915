"""Encoder of Qwen-Image and its edit models: last states of a Qwen2.5-VL, without the template's
words. Edit models show it the source before the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from maskserve_common.config import Config
from maskserve_common.errors import InvalidRequest
from maskserve_engine.base.job import Conditioning
from maskserve_engine.families.encoder import (
    RECORDED_LENGTHS,
    OneTextEncoder,
    TextEncoder,
    to_numpy,
)
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_engine.stages.encoded import TokensRead
from maskserve_engine.stages.loader import load_plain

_PLACE, _FILM = "<|image_pad|>", "<|video_pad|>"
"""Tokens that stand for a picture, or a film, in a template; each is expanded to the picture's
number of tokens."""


class LastStates:
    """Stands for a Qwen2.5-VL in the pipeline's function, which reads its last states: no logits
    are computed. A call without a picture may be recorded, padded to few lengths: states do not
    depend on tokens behind them.
    """

    def __init__(self, text: TextEncoder) -> None:
        self._text = text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._text.model, name)

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        output_hidden_states: bool = True,
        **picture: Tensor,
    ) -> Any:
        inputs, states_of = torch.stack((input_ids, attention_mask)), self.states_of
        if picture:
            states = self._text.model.model(
                input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **picture
            ).last_hidden_state
        elif self._text.graphs is None:
            states = states_of(inputs)
        else:
            length = inputs.shape[-1]
            inputs = F.pad(inputs, (0, -length % RECORDED_LENGTHS))
            states = self._text.answer(states_of, inputs)[:, :length]
        return SimpleNamespace(hidden_states=(states,))

    def states_of(self, inputs: Tensor) -> Tensor:
        """Return [prompts, T, width] from token ids and mask [2, prompts, T]."""
        ids, mask = inputs.unbind()
        states: Tensor = self._text.model.model(
            input_ids=ids, attention_mask=mask, use_cache=False
        ).last_hidden_state
        return states


@dataclass(frozen=True, slots=True)
class TemplateEncoder(TextEncoder):
    """A text encoder that reads prompts in its pipeline's template."""

    pipeline: Any
    """The pipeline, which has the template and reads prompts; it has no other parts."""

    @classmethod
    def of(cls, text: TextEncoder, pipeline: type, **parts: Any) -> Self:
        """Build from a folder's text encoder and the other parts with which its pipeline reads
        prompts.
        """
        prompt_pipeline = pipeline(
            scheduler=None, vae=None, transformer=None, text_encoder=text.model,
            tokenizer=text.tokenizer, **parts,
        )  # fmt: skip
        prompt_pipeline.text_encoder = LastStates(text)
        return cls(text.tokenizer, text.model, text.length, prompt_pipeline)

    def read_of(self, prompt: str) -> TokensRead:
        template = self.pipeline.prompt_template_encode
        encoding = self.tokenizer(template.format(prompt), verbose=False)
        words = len(encoding.input_ids) - self.pipeline.prompt_template_encode_start_idx
        words -= _PLACE in template
        used = min(words, self.length)
        return TokensRead(used, words - used)


def text_of(config: Config) -> TextEncoder:
    """Load a folder's Qwen2.5-VL. Raises ConfigError if it cannot be loaded."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    length = config.model.max_sequence_length
    return TextEncoder.load(config, Qwen2_5_VLForConditionalGeneration, length=length)


class QwenImageEncoder(OneTextEncoder):
    """VAE encoder and text encoder of a Qwen-Image folder: a Qwen2.5-VL."""

    text: TemplateEncoder

    @staticmethod
    def load_text(spec: ModelSpec, config: Config) -> TextEncoder:
        from diffusers import QwenImageInpaintPipeline

        text = text_of(config)
        text = text.recorded() if config.engine.cuda_graphs else text
        encoder = TemplateEncoder.of(text, QwenImageInpaintPipeline)
        # What is behind would be computed and cut; no state depends on it.
        encoder.pipeline.tokenizer_max_length = text.length
        return encoder

    def encode_prompts(self, prompts: Sequence[str]) -> list[Conditioning]:
        """Return `prompt_embeds` [T, width] of each prompt, without padding."""
        with torch.inference_mode():
            states, mask = self.text.pipeline.encode_prompt(
                list(prompts), self.text.model.device, max_sequence_length=self.text.length
            )
        lengths = [states.shape[1]] * len(states) if mask is None else mask.sum(1).tolist()
        return [
            {"prompt_embeds": prompt_states[: int(length)].copy()}
            for prompt_states, length in zip(to_numpy(states), lengths, strict=True)
        ]


class QwenImageEditEncoder(OneTextEncoder):
    """Encoder of an edit model's folder, whose prompts are about the source."""

    text: TemplateEncoder

    @staticmethod
    def load_text(spec: ModelSpec, config: Config) -> TextEncoder:
        from diffusers import QwenImageEditInpaintPipeline, QwenImageEditPlusPipeline
        from transformers import Qwen2VLImageProcessorPil, Qwen2VLProcessor

        assert spec.encoder_picture is not None
        pipeline = (
            QwenImageEditPlusPipeline if spec.encoder_picture.area else QwenImageEditInpaintPipeline
        )
        text = text_of(config)
        pictures = load_plain(config, "processor", Qwen2VLImageProcessorPil)
        return TemplateEncoder.of(
            text, pipeline, processor=picture_processor(Qwen2VLProcessor, pictures, text.tokenizer)
        )

    def encode_prompts(self, prompts: Sequence[str]) -> list[Conditioning]:
        raise AssertionError("each prompt is about a picture")

    def encode_prompt(
        self, prompt: str, pictures: Sequence[NDArray[np.uint8]] = ()
    ) -> Conditioning:
        """Return `prompt_embeds` [pictures + T, width]. Long prompts are cut, unlike in the
        pipeline.
        """
        assert pictures, "the prompt is about a picture"
        check_prompt(prompt)
        images = [self.resized(pixels) for pixels in pictures]
        with torch.inference_mode():
            [states], _ = self.text.pipeline.encode_prompt(
                prompt, images if len(images) > 1 else images[0], self.text.model.device
            )
        used_tokens = len(states) - self.text.read_of(prompt).cut
        return {"prompt_embeds": to_numpy(states[:used_tokens])}

    def resized(self, pixels: NDArray[np.uint8]) -> Image.Image:
        """Return a picture as the text encoder's processor gets it."""
        assert self.spec.encoder_picture is not None
        height, width = self.spec.encoder_picture.size(*pixels.shape[:2])
        resized: Image.Image = self.text.pipeline.image_processor.resize(
            Image.fromarray(pixels), height, width
        )
        return resized


def check_prompt(prompt: str) -> None:
    """Check that a prompt contains no picture token. Raises InvalidRequest if it does."""
    for place in (_PLACE, _FILM):
        if place in prompt:
            raise InvalidRequest(
                "PROMPT or SETTINGS.negative_prompt", f"{place} is where the model has a picture"
            )


def picture_processor(cls: Any, pictures: Any, tokenizer: Any) -> Any:
    """Return a processor without films, for which transformers would need torchvision."""

    def init(self: Any, image_processor: Any, tokenizer: Any) -> None:  # names its parts
        cls.__init__(self, image_processor, tokenizer, chat_template=tokenizer.chat_template)

    processor_class: Any = type("PictureProcessor", (cls,), {"__init__": init})
    return processor_class(pictures, tokenizer)
