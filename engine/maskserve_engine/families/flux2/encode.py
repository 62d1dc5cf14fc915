"""What FLUX.2 klein takes of a prompt: three layers' states of a Qwen3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from maskserve_core.config import Config
from maskserve_core.models.facts import ModelFacts
from maskserve_engine.base.job import Conditioning
from maskserve_engine.families.encoder import Encoder, TextEncoder, to_numpy
from maskserve_engine.stages.cpu_threads import limit_threads
from maskserve_engine.stages.encoded import TokensRead
from maskserve_engine.stages.loader import load_part
from maskserve_engine.stages.vae import load_vae

_LAYERS = (9, 18, 27)
"""Whose states the pipeline stacks: the last one's are the last that are computed."""


@dataclass(frozen=True, slots=True)
class _ChatEncoder(TextEncoder):
    """Whose prompts stand in a chat template."""

    def read_of(self, prompt: str) -> TokensRead:
        said = [{"role": "user", "content": prompt}]
        whole = len(
            self.tokenizer.apply_chat_template(
                said, tokenize=True, add_generation_prompt=True, enable_thinking=False,
                return_dict=True,
            )["input_ids"]
        )  # fmt: skip
        used = min(whole, self.length)
        return TokensRead(used, whole - used)


class Flux2Encoder(Encoder):
    """VAE encoder and text encoder of a FLUX.2 klein folder.

    Args:
        facts: what the folder says.
        vae: AutoencoderKLFlux2.
        text: a Qwen3 up to the last layer that is read.
    """

    def __init__(self, facts: ModelFacts, vae: Any, text: TextEncoder) -> None:
        super().__init__(facts, vae)
        self.text = text

    @classmethod
    def load(cls, facts: ModelFacts, config: Config) -> Flux2Encoder:
        """Raises ConfigError when a part cannot be loaded."""
        from transformers import Qwen3Model

        limit_threads(config)
        text = _ChatEncoder.load(
            config, Qwen3Model, length=config.model.max_sequence_length, load=_first_layers
        )
        return cls(facts, load_vae(config, facts), text)

    @property
    def text_encoders(self) -> dict[str, TextEncoder]:
        return {"text_encoder": self.text}

    @property
    def text_models(self) -> dict[str, Any]:
        """None: diffusers applies LoRAs of FLUX.2 to the transformer alone."""
        return {}

    def encode_prompts(self, prompts: Sequence[str]) -> list[Conditioning]:
        """`prompt_embeds` [T, 3 · width] of each prompt, padding among the tokens."""
        from diffusers import Flux2KleinInpaintPipeline

        with torch.inference_mode():
            states = Flux2KleinInpaintPipeline._get_qwen3_prompt_embeds(
                self.text.model,
                self.text.tokenizer,
                list(prompts),
                max_sequence_length=self.text.length,
                hidden_states_layers=_LAYERS,
            )
        return [{"prompt_embeds": each.copy()} for each in to_numpy(states)]


def _first_layers(config: Config, name: str, cls: Any) -> Any:
    """The model without what is behind the last layer that is read, a quarter of it or more."""
    model = load_part(config, name, cls)
    own = getattr(model, "model", model)  # of its shape alone: with the head of a language model
    own.layers = own.layers[: _LAYERS[-1]]
    own.norm = torch.nn.Identity()
    return own
