"""From pixels and prompt to what a denoiser takes: the part that all families share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskserve_core.config import Config
from maskserve_core.models.facts import ModelFacts
from maskserve_engine.job import Conditioning
from maskserve_engine.stages.encoded import NO_MOMENTS, Encoded
from maskserve_engine.stages.loader import load_part, load_plain


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """A text model with its tokenizer."""

    tokenizer: Any
    model: Any
    length: int
    """Tokens of a prompt: shorter ones are padded, longer ones cut, as diffusers does."""

    @classmethod
    def load(
        cls, config: Config, model: Any, number: str = "", length: int | None = None
    ) -> TextEncoder:
        """The text encoder of a folder.

        Args:
            config: names the folder.
            model: its class.
            number: what the folder's parts have behind their names: "", or "_2" for the second.
            length: of prompts; None: the tokenizer's own.

        Raises:
            ConfigError: a part is missing or cannot be read.
        """
        from transformers import AutoTokenizer

        tokenizer = load_plain(config, f"tokenizer{number}", AutoTokenizer)
        own = load_part(config, f"text_encoder{number}", model)
        return cls(tokenizer, own, length or tokenizer.model_max_length)

    def __call__(self, prompt: str, *, hidden_states: bool = False) -> Any:
        """The model's output, with every layer's states if asked for."""
        ids = self.tokenizer(
            [prompt],
            padding="max_length",
            max_length=self.length,
            truncation=True,
            return_tensors="pt",
        ).input_ids
        return self.model(ids.to(self.model.device), output_hidden_states=hidden_states)


class Encoder(ABC):
    """The VAE's encoder and the text encoders of a model folder.

    The posterior's moments are returned, not a sample: every random number of an edit is drawn in
    the denoiser from one generator, in the pipeline's own order (design §4).

    Args:
        facts: what the folder says.
        vae: AutoencoderKL.
    """

    def __init__(self, facts: ModelFacts, vae: Any) -> None:
        self.facts, self.vae = facts, vae

    def encode(
        self,
        pixels: NDArray[np.uint8],
        edit_mask: NDArray[np.uint8],
        prompt: str,
        negative_prompt: str | None = None,
    ) -> Encoded:
        """Encode one edit, all of it anew.

        Args:
            pixels: [H, W, 3] source at model resolution.
            edit_mask: [H, W], above 127 = edit.
            prompt: any text; what exceeds the text encoders is cut, as diffusers does.
            negative_prompt: what to lead away from, as `prompt`; None where nothing is.
        """
        moments, masked = self.moments(pixels), NO_MOMENTS
        if self.facts.semantics == "fill":
            masked = self.masked_moments(pixels, edit_mask)
        away = None if negative_prompt is None else self.encode_negative(negative_prompt)
        return Encoded(moments, masked, self.encode_prompt(prompt), away)

    def moments(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """[2C, h, w] of the source."""
        with torch.inference_mode():
            return self._moments(_image(pixels))

    def masked_moments(
        self, pixels: NDArray[np.uint8], edit_mask: NDArray[np.uint8]
    ) -> NDArray[np.float32]:
        """[2C, h, w] of the source with the masked area blanked."""
        with torch.inference_mode():
            return self._moments(_image(pixels) * torch.from_numpy(edit_mask <= 127))

    @property
    @abstractmethod
    def text_models(self) -> dict[str, Any]:
        """The text encoders that adapters may change, by their folders' names."""

    @abstractmethod
    def encode_prompt(self, prompt: str) -> Conditioning:
        """A prompt's arrays, by the family's own names."""

    def encode_negative(self, prompt: str) -> Conditioning:
        """The same of a negative prompt."""
        return self.encode_prompt(prompt)

    def _moments(self, image: Tensor) -> NDArray[np.float32]:
        posterior = self.vae.encode(image.to(self.vae.device, self.vae.dtype)).latent_dist
        return to_numpy(posterior.parameters[0])


def _image(pixels: NDArray[np.uint8]) -> Tensor:
    """[1, 3, H, W] in [-1, 1]; float32 until the VAE, as VaeImageProcessor does."""
    scaled = torch.from_numpy(pixels.astype(np.float32)).permute(2, 0, 1)[None]
    return (scaled / 255.0) * 2.0 - 1.0


def to_numpy(x: Tensor) -> NDArray[np.float32]:
    """On the host, in float32."""
    return x.float().cpu().numpy()
