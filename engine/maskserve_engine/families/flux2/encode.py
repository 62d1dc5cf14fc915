"""Encoders of FLUX.2: the states of three layers of a Qwen3 (klein) or a Mistral 3 (dev)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from maskserve_common.config import Config
from maskserve_engine.base.job import Conditioning
from maskserve_engine.families.encoder import ChatEncoder, OneTextEncoder, TextEncoder, to_numpy
from maskserve_engine.families.flux2.spec import DEV_LAYERS, LAYERS
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_engine.stages.encoded import TokensRead
from maskserve_engine.stages.loader import load_part


class LayerStates:
    """Stands for a text encoder in the pipeline's function, which reads the states of some layers:
    all that its call returns, so that it may be recorded.
    """

    def __init__(self, text: TextEncoder, layers: Sequence[int]) -> None:
        self._text, self._layers = text, layers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._text.model, name)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, **options: Any) -> Any:
        states = self._text.answer(self.states_of, torch.stack((input_ids, attention_mask)))
        return SimpleNamespace(hidden_states=dict(zip(self._layers, states, strict=True)))

    def states_of(self, inputs: Tensor) -> Tensor:
        """Return [layers, prompts, T, width] from token ids and mask [2, prompts, T]."""
        ids, mask = inputs.unbind()
        output = self._text.model(
            input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False
        )
        return torch.stack([output.hidden_states[layer] for layer in self._layers])


class Flux2Encoder(OneTextEncoder):
    """VAE encoder and text encoder of a FLUX.2 klein folder: a Qwen3 up to the last layer that is
    read.
    """

    layers: ClassVar[Sequence[int]] = LAYERS
    """Layers whose states the pipeline reads."""

    @staticmethod
    def load_text(spec: ModelSpec, config: Config) -> TextEncoder:
        from transformers import Qwen3Model

        length = config.model.max_sequence_length
        text = ChatEncoder.load(config, Qwen3Model, length=length, load=first_layers)
        return text.recorded() if config.engine.cuda_graphs else text

    def encode_prompts(self, prompts: Sequence[str]) -> list[Conditioning]:
        """Return `prompt_embeds` [T, 3 · width] of each prompt, with padding tokens."""
        text = self.text
        with torch.inference_mode():
            states = self.prompt_states(
                LayerStates(text, self.layers),
                text.tokenizer,
                list(prompts),
                max_sequence_length=text.length,
            )
        return [{"prompt_embeds": state.copy()} for state in to_numpy(states)]

    @staticmethod
    def prompt_states(*text: Any, max_sequence_length: int) -> Tensor:
        """Return the states [prompts, T, 3 · width] that the model's pipeline reads, from a text
        encoder, its tokenizer and prompts.
        """
        from diffusers import Flux2KleinInpaintPipeline

        states: Tensor = Flux2KleinInpaintPipeline._get_qwen3_prompt_embeds(
            *text, max_sequence_length=max_sequence_length, hidden_states_layers=LAYERS
        )
        return states


@dataclass(frozen=True, slots=True)
class _InstructedEncoder(TextEncoder):
    """A text encoder whose chat begins with the pipeline's instructions."""

    def read_of(self, prompt: str) -> TokensRead:
        from diffusers.pipelines.flux2.pipeline_flux2 import format_input

        [messages] = format_input([prompt])
        tokens = self.tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=False, return_dict=True
        )
        whole = len(tokens["input_ids"])
        used = min(whole, self.length)
        return TokensRead(used, whole - used)


class Flux2DevEncoder(Flux2Encoder):
    """Encoder of a FLUX.2 dev folder: a Mistral 3 that sees no picture. Its tokenizer does for the
    pipeline's processor, which needs torchvision.
    """

    layers = DEV_LAYERS

    @staticmethod
    def load_text(spec: ModelSpec, config: Config) -> TextEncoder:
        from transformers import Mistral3Model

        length = config.model.max_sequence_length
        return _InstructedEncoder.load(config, Mistral3Model, length=length, load=first_layers)

    @staticmethod
    def prompt_states(*text: Any, max_sequence_length: int) -> Tensor:
        """Return the states as `Flux2Encoder.prompt_states` does."""
        from diffusers import Flux2Pipeline

        states: Tensor = Flux2Pipeline._get_mistral_3_small_prompt_embeds(
            *text, max_sequence_length=max_sequence_length, hidden_states_layers=DEV_LAYERS
        )
        return states


def first_layers(config: Config, name: str, cls: Any) -> Any:
    """Load a text encoder without the layers after the last one that is read, at least a quarter of
    it, and without the part that sees pictures.
    """
    model = load_part(config, name, cls)
    # Of its shape alone, it has the head of a language model.
    backbone = language = getattr(model, "model", model)
    if hasattr(backbone, "vision_tower"):
        backbone.vision_tower = backbone.multi_modal_projector = torch.nn.Identity()
        language = backbone.language_model
    count = LAYERS[-1] if language is backbone else DEV_LAYERS[-1]
    language.layers = language.layers[:count]
    language.norm = torch.nn.Identity()
    return model
