"""Encoder of FLUX.2 klein: the states of three layers of a Qwen3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from maskserve_common.config import Config
from maskserve_engine.base.job import Conditioning
from maskserve_engine.families.encoder import ChatEncoder, OneTextEncoder, TextEncoder, to_numpy
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_engine.stages.loader import load_part

_LAYERS = (9, 18, 27)
"""Layers whose states the pipeline stacks; layers after the last one are not computed."""


class Flux2Encoder(OneTextEncoder):
    """VAE encoder and text encoder of a FLUX.2 klein folder: a Qwen3 up to the last layer that is
    read.
    """

    @staticmethod
    def load_text(spec: ModelSpec, config: Config) -> TextEncoder:
        from transformers import Qwen3Model

        return ChatEncoder.load(
            config, Qwen3Model, length=config.model.max_sequence_length, load=first_layers
        )

    def encode_prompts(self, prompts: Sequence[str]) -> list[Conditioning]:
        """Return `prompt_embeds` [T, 3 · width] of each prompt, with padding tokens."""
        from diffusers import Flux2KleinInpaintPipeline

        with torch.inference_mode():
            states = Flux2KleinInpaintPipeline._get_qwen3_prompt_embeds(
                self.text.model,
                self.text.tokenizer,
                list(prompts),
                max_sequence_length=self.text.length,
                hidden_states_layers=_LAYERS,
            )
        return [{"prompt_embeds": state.copy()} for state in to_numpy(states)]


def first_layers(config: Config, name: str, cls: Any) -> Any:
    """Load the model without the layers after the last one that is read, at least a quarter of
    it.
    """
    model = load_part(config, name, cls)
    backbone = getattr(
        model, "model", model
    )  # of its shape alone: with the head of a language model
    backbone.layers = backbone.layers[: _LAYERS[-1]]
    backbone.norm = torch.nn.Identity()
    return backbone
