"""From pixels and prompt to what FLUX takes: VAE moments, T5 states and CLIP's pooled vector."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskserve_core.config import Config
from maskserve_core.contracts.facts import ModelFacts
from maskserve_engine.job import Conditioning
from maskserve_engine.stages.encoded import Encoded
from maskserve_engine.stages.loader import limit_threads, load_part, load_plain


class FluxEncoder:
    """VAE encoder and the two text encoders of a Flux folder.

    The posterior's moments are returned, not a sample: every random number of an edit is drawn in
    the denoiser from one generator, in the pipeline's own order (design §4).
    """

    def __init__(
        self,
        facts: ModelFacts,
        vae: Any,
        clip: Any,
        t5: Any,
        clip_tokens: Any,
        t5_tokens: Any,
        max_sequence_length: int,
    ) -> None:
        self.facts = facts
        self.vae, self.clip, self.t5 = vae, clip, t5
        self.clip_tokens, self.t5_tokens = clip_tokens, t5_tokens
        self.max_sequence_length = max_sequence_length

    @classmethod
    def load(cls, facts: ModelFacts, config: Config) -> FluxEncoder:
        """Raises ConfigError when a part cannot be loaded."""
        from diffusers import AutoencoderKL
        from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

        limit_threads(config)
        return cls(
            facts,
            load_part(config, "vae", AutoencoderKL),
            load_part(config, "text_encoder", CLIPTextModel),
            load_part(config, "text_encoder_2", T5EncoderModel),
            load_plain(config, "tokenizer", AutoTokenizer),
            load_plain(config, "tokenizer_2", AutoTokenizer),
            config.model.max_sequence_length,
        )

    def encode(
        self,
        pixels: NDArray[np.uint8],
        edit_mask: NDArray[np.uint8],
        prompt: str,
        negative_prompt: str | None = None,
    ) -> Encoded:
        """Encode one edit.

        Args:
            pixels: [H, W, 3] source at model resolution.
            edit_mask: [H, W], above 127 = edit.
            prompt: any text; what exceeds the text encoders is cut, as diffusers does.
            negative_prompt: what to lead away from, as `prompt`; None where nothing is.
        """
        with torch.inference_mode():
            image = self._image(pixels)
            moments = self._moments(image)
            masked = np.zeros((0, 0, 0), np.float32)
            if self.facts.semantics == "fill":
                keep = torch.from_numpy(edit_mask <= 127).to(image)
                masked = self._moments(image * keep)
            text = self.encode_prompt(prompt)
            away = None if negative_prompt is None else self.encode_prompt(negative_prompt)
            return Encoded(moments, masked, text, away)

    def encode_prompt(self, prompt: str) -> Conditioning:
        """T5's hidden states and CLIP's pooled output of a prompt."""
        with torch.inference_mode():
            return {
                "prompt_embeds": self._t5_states(prompt),
                "pooled": self._clip_pooled(prompt),
            }

    def _image(self, pixels: NDArray[np.uint8]) -> Tensor:
        """[1, 3, H, W] in [-1, 1]; float32 until the VAE, as VaeImageProcessor does."""
        scaled = torch.from_numpy(pixels.astype(np.float32)).permute(2, 0, 1)[None]
        return (scaled / 255.0) * 2.0 - 1.0

    def _moments(self, image: Tensor) -> NDArray[np.float32]:
        posterior = self.vae.encode(image.to(self.vae.device, self.vae.dtype)).latent_dist
        return posterior.parameters[0].float().cpu().numpy()

    def _t5_states(self, prompt: str) -> NDArray[np.float32]:
        ids = self.t5_tokens(
            [prompt],
            padding="max_length",
            max_length=self.max_sequence_length,
            truncation=True,
            return_tensors="pt",
        ).input_ids
        return self.t5(ids.to(self.t5.device))[0][0].float().cpu().numpy()

    def _clip_pooled(self, prompt: str) -> NDArray[np.float32]:
        ids = self.clip_tokens(
            [prompt],
            padding="max_length",
            max_length=self.clip_tokens.model_max_length,
            truncation=True,
            return_tensors="pt",
        ).input_ids
        return self.clip(ids.to(self.clip.device)).pooler_output[0].float().cpu().numpy()
