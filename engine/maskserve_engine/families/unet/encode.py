"""From pixels and prompt to what a UNet takes: VAE moments and CLIP's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskserve_core.config import Config
from maskserve_core.contracts.facts import ModelFacts
from maskserve_engine.job import Conditioning
from maskserve_engine.stages.encoded import Encoded
from maskserve_engine.stages.loader import device_of, limit_threads, load_part, load_plain


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """A CLIP text model with its tokenizer."""

    tokenizer: Any
    model: Any

    def __call__(self, prompt: str) -> Any:
        """The model's output with all hidden states; what exceeds its length is cut."""
        ids = self.tokenizer(
            [prompt],
            padding="max_length",
            max_length=self.tokenizer.model_max_length,
            truncation=True,
            return_tensors="pt",
        ).input_ids
        return self.model(ids.to(self.model.device), output_hidden_states=True)


class UnetEncoder:
    """VAE encoder and the text encoders, one or (SDXL) two, of a Stable Diffusion folder.

    Args:
        facts: what the model folder says.
        vae: AutoencoderKL.
        encoders: in the pipeline's order.
    """

    def __init__(self, facts: ModelFacts, vae: Any, encoders: Sequence[TextEncoder]) -> None:
        self.facts, self.vae, self.encoders = facts, vae, tuple(encoders)

    @classmethod
    def load(cls, facts: ModelFacts, config: Config) -> UnetEncoder:
        """Raises ConfigError when a part cannot be loaded."""
        from diffusers import AutoencoderKL
        from transformers import AutoTokenizer, CLIPTextModel, CLIPTextModelWithProjection

        limit_threads(config)
        vae = load_part(config, "vae", AutoencoderKL)
        if facts.micro_conditioning and vae.config.force_upcast:
            vae = vae.to(device_of(config), torch.float32)
        encoders = [
            TextEncoder(
                load_plain(config, "tokenizer", AutoTokenizer),
                load_part(config, "text_encoder", CLIPTextModel),
            )
        ]
        if facts.micro_conditioning:
            second = TextEncoder(
                load_plain(config, "tokenizer_2", AutoTokenizer),
                load_part(config, "text_encoder_2", CLIPTextModelWithProjection),
            )
            encoders.append(second)
        return cls(facts, vae, encoders)

    def encode(
        self,
        pixels: NDArray[np.uint8],
        edit_mask: NDArray[np.uint8],
        prompt: str,
        negative_prompt: str | None = None,
    ) -> Encoded:
        """Encode one edit; see `registry.Encoder`."""
        with torch.inference_mode():
            image = self._image(pixels)
            moments = self._moments(image)
            masked = np.zeros((0, 0, 0), np.float32)
            if self.facts.semantics == "fill":
                masked = self._moments(image * torch.from_numpy(edit_mask <= 127))
            negative = None if negative_prompt is None else self._negative(negative_prompt)
            return Encoded(moments, masked, self.encode_prompt(prompt), negative)

    def encode_prompt(self, prompt: str) -> Conditioning:
        """`prompt_embeds` [T, width] and, for SDXL, `pooled` [width] of a prompt."""
        with torch.inference_mode():
            answers = [encoder(prompt) for encoder in self.encoders]
            if not self.facts.micro_conditioning:
                return {"prompt_embeds": _numpy(answers[0].last_hidden_state[0])}
            # SDXL reads the layer before the last of both, and the second one's projection.
            states = torch.cat([answer.hidden_states[-2][0] for answer in answers], dim=1)
            return {"prompt_embeds": _numpy(states), "pooled": _numpy(answers[1].text_embeds[0])}

    def _negative(self, prompt: str) -> Conditioning:
        """SDXL base was trained with zeros where there is no prompt."""
        encoded = self.encode_prompt(prompt)
        if not prompt and self.facts.zeros_for_empty_prompt:
            return {name: np.zeros_like(array) for name, array in encoded.items()}
        return encoded

    def _image(self, pixels: NDArray[np.uint8]) -> Tensor:
        """[1, 3, H, W] in [-1, 1]; float32 until the VAE, as VaeImageProcessor does."""
        scaled = torch.from_numpy(pixels.astype(np.float32)).permute(2, 0, 1)[None]
        return (scaled / 255.0) * 2.0 - 1.0

    def _moments(self, image: Tensor) -> NDArray[np.float32]:
        posterior = self.vae.encode(image.to(self.vae.device, self.vae.dtype)).latent_dist
        return _numpy(posterior.parameters[0])


def _numpy(x: Tensor) -> NDArray[np.float32]:
    return x.float().cpu().numpy()
