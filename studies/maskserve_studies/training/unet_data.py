"""Training samples of the demo UNet, made from the demo model's own drawn samples."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import torch
from diffusers import AutoencoderKL
from numpy.typing import NDArray
from transformers import CLIPTextModel, CLIPTokenizer

from maskserve_benchmarks.demo_model.palette import COLOURS, SHAPES
from maskserve_benchmarks.demo_model.prompts import SAME, every_phrase
from maskserve_studies.training.sampler import window_at
from maskserve_studies.training.unet import LATENT_CHANNELS, TEXT_LENGTH, Batch

_EMPTY_SHARE: Final = 0.1  # share of samples with an empty prompt, which continue the region
_IDENTITY_SHARE: Final = 0.04  # share of samples without mask and prompt (priming)
_NEAREST: Final = 0  # place of a token's nearest mask pixel, in packed order

Prompts = dict[tuple[int, int], torch.Tensor]
"""For each (colour, shape) number, (-1, -1) for the empty prompt: its wordings' states (P, T,
width).
"""


@torch.no_grad()
def encode_prompts(tokenizer: CLIPTokenizer, encoder: CLIPTextModel) -> Prompts:
    """Encode every wording of every wish, and the empty prompt, like the pipeline."""
    texts: dict[tuple[int, int], list[str]] = {(-1, -1): [""]}
    for text, colour, shape in every_phrase():
        if SAME in (colour, shape):
            continue
        key = (list(COLOURS).index(colour), SHAPES.index(shape))
        texts.setdefault(key, []).extend([text, text.capitalize()])
    return {
        key: encoder(
            tokenizer(
                prompts,
                padding="max_length",
                truncation=True,
                max_length=TEXT_LENGTH,
                return_tensors="pt",
            ).input_ids
        )[0]
        for key, prompts in texts.items()
    }


class Sampler:
    """Draws batches of one latent window from the samples of one folder (`data.write_part`).

    Args:
        folder: samples of one picture size.
        wide: the VAE that encoded the samples.
        scale: scaling factor of the narrow VAE.
        prompts: from `encode_prompts`.
        seed: of all draws.
    """

    def __init__(
        self, folder: Path, wide: AutoencoderKL, scale: float, prompts: Prompts, seed: int
    ) -> None:
        answers, masked, self._mask, self._wish, self._box = (
            np.load(folder / f"{name}.npy", mmap_mode="r")
            for name in ("answers", "masked", "mask", "wish", "box")
        )
        self._answers, self._masked = answers, masked
        self._prompts = prompts
        self._rng = np.random.default_rng(seed)
        self._gain = scale / wide.config.scaling_factor
        self._shift = scale * wide.config.shift_factor
        box = self._box
        self._spans = np.maximum(box[:, 1] - box[:, 0], box[:, 3] - box[:, 2])

    def draw(self, count: int, window: int | None) -> Batch:
        """`count` samples, cut to `window` x `window` tokens round their masks or whole. A token is
        2 x 2 latents.
        """
        rng = self._rng
        whole = self._masked.shape[1:3]
        size = whole if window is None else (window, window)
        fitting = np.flatnonzero(self._spans <= min(size))
        wishes = self._wish.shape[1]
        clean, masked, masks, states = [], [], [], []
        for i in np.sort(rng.choice(fitting, size=count)):
            at = window_at(rng, self._box[i], size, whole)
            draw = rng.random()
            wish = int(rng.integers(wishes)) if draw >= _EMPTY_SHARE + _IDENTITY_SHARE else wishes
            answer, source = self._answers[i, wish][at], self._masked[i][at]
            mask = np.unpackbits(self._mask[i][at], axis=2)
            if draw < _IDENTITY_SHARE:
                answer = self._answers[i, int(rng.integers(wishes + 1))][at]
                source, mask = answer, np.zeros_like(mask)
            key = (-1, -1)
            if wish < wishes:
                key = (int(self._wish[i, wish, 0]), int(self._wish[i, wish, 1]))
            wordings = self._prompts[key]
            states.append(wordings[0 if rng.random() < 0.4 else int(rng.integers(len(wordings)))])
            clean.append(answer)
            masked.append(source)
            masks.append(mask)
        return Batch(
            self._latents(clean),
            self._latents(masked),
            _nearest(np.stack(masks)),
            torch.stack(states),
        )

    def _latents(self, grids: list[NDArray[np.float16]]) -> torch.Tensor:
        """(R, C, 4 channels) tokens as (B, 4, 2 R, 2 C) latents of the narrow VAE."""
        tokens = torch.from_numpy(np.stack(grids)).float()
        quads = tokens.unflatten(3, (-1, 2, 2))[:, :, :, :LATENT_CHANNELS]
        latents = quads.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
        return latents * self._gain + self._shift


def _nearest(masks: NDArray[np.uint8]) -> torch.Tensor:
    """(B, R, C, 4 factor²) mask pixels as (B, 1, 2 R, 2 C), the upper left pixel of each latent."""
    pixels = torch.from_numpy(masks).float()
    quads = pixels.unflatten(3, (-1, 2, 2))[:, :, :, _NEAREST]
    return quads.permute(0, 1, 3, 2, 4).flatten(3, 4).flatten(1, 2)[:, None]
