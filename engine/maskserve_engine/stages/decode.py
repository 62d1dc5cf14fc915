"""From latents to pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from maskserve_core.config import Config
from maskserve_core.models.facts import LatentSpace, ModelFacts
from maskserve_engine.stages.cpu_threads import limit_threads
from maskserve_engine.stages.loader import load_part


class Decoder:
    """The VAE's decoder."""

    def __init__(self, vae: Any, latents: LatentSpace) -> None:
        self.vae, self.latents = vae, latents

    @classmethod
    def load(cls, facts: ModelFacts, config: Config) -> Decoder:
        """Raises ConfigError when the VAE cannot be loaded."""
        from diffusers import AutoencoderKL

        limit_threads(config)
        vae = load_part(config, "vae", AutoencoderKL)
        if vae.dtype == torch.float16 and vae.config.force_upcast:
            vae = vae.float()  # in half precision it overflows, as its folder says
        return cls(vae, facts.latents)

    def decode(self, latents: NDArray[np.float32]) -> NDArray[np.uint8]:
        """[C, h, w] latents as the sampler leaves them → [H, W, 3] pixels."""
        space = self.latents
        with torch.inference_mode():
            x = torch.from_numpy(latents)[None].to(self.vae.device, self.vae.dtype)
            image = self.vae.decode(x / space.scale + space.shift)[0][0]
            image = (image * 0.5 + 0.5).clamp(0, 1).permute(1, 2, 0).float().cpu().numpy()
        return (image * 255).round().astype(np.uint8)
