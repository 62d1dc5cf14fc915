"""Training samples: drawn scenes as packed latents in memory-mapped files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxFillPipeline
from numpy.typing import NDArray

from demo_model.palette import COLOURS, SHAPES
from demo_model.prompts import every_phrase
from demo_model.scenes import finish, make_scene
from demo_model.text import MAX_SEQUENCE_LENGTH
from demo_model.transformer import Batch, pack, pack_mask
from demo_model.vae import to_tensor

WISHES: Final = 3  # objects drawn per scene; one more answer is the scene with nothing added
EMPTY_SHARE: Final = 0.04  # of samples: empty prompt, the region is just continued
IDENTITY_SHARE: Final = 0.06  # of samples: no mask, empty prompt, the picture itself (priming)


# Per (colour, shape) number, (-1, -1) for the empty prompt: the wordings' T5 states
# (P, T, width) and pooled CLIP outputs (P, width).
Prompts = dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Part:
    """Scenes of one picture size. Arrays are (scenes, rows, columns, ...) of tokens."""

    answers: NDArray[np.float16]
    """(S, WISHES + 1, R, C, 4 channels); the last one without an object."""
    masked: NDArray[np.float16]
    """(S, R, C, 4 channels): the masked source."""
    mask: NDArray[np.uint8]
    """(S, R, C, factor² / 2): mask pixels, packed 8 to a byte."""
    wish: NDArray[np.uint8]
    """(S, WISHES, 2): colour and shape numbers."""
    box: NDArray[np.uint8]
    """(S, 4): first and last + 1 row, first and last + 1 column that the mask touches."""


@torch.no_grad()
def encode(vae: AutoencoderKL, pictures: torch.Tensor) -> torch.Tensor:
    """(B, 3, H, W) in -1..1 as normalised latents (B, C, h, w), posterior mode."""
    latents = vae.encode(pictures).latent_dist.mode()
    return (latents - vae.config.shift_factor) * vae.config.scaling_factor


def write_part(
    vae: AutoencoderKL, folder: Path, size: tuple[int, int], scenes: int, seed: int
) -> None:
    """Draw and encode `scenes` scenes of `size` (height, width) into `folder`; skips if there."""
    if (folder / "done").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    grid = (size[0] // factor // 2, size[1] // factor // 2)
    width = 4 * vae.config.latent_channels

    def create(name: str, dtype: Any, *shape: int) -> NDArray[Any]:
        return np.lib.format.open_memmap(
            folder / f"{name}.npy", mode="w+", dtype=dtype, shape=(scenes, *shape)
        )

    answers = create("answers", np.float16, WISHES + 1, *grid, width)
    masked = create("masked", np.float16, *grid, width)
    masks = create("mask", np.uint8, *grid, factor**2 // 2)
    wishes = create("wish", np.uint8, WISHES, 2)
    boxes = create("box", np.uint8, 4)
    rng = np.random.default_rng(seed)
    kernel = _linear_code(vae)
    for i in range(scenes):
        scene = make_scene(rng, size)
        wish = [
            (int(rng.integers(len(COLOURS))), int(rng.integers(len(SHAPES)))) for _ in range(WISHES)
        ]
        pictures = [finish(scene, list(COLOURS)[c], SHAPES[s]) for c, s in wish]
        pictures.append(np.clip(np.rint(scene.background), 0, 255).astype(np.uint8))
        mask = torch.from_numpy(scene.mask.astype(np.float32))[None]
        x = to_tensor([*pictures, scene.source])
        x[-1] *= 1 - mask
        tokens = (
            pack(torch.nn.functional.conv2d(x, *kernel, stride=factor)).numpy().astype(np.float16)
        )
        answers[i] = tokens[:-1].reshape(WISHES + 1, *grid, width)
        masked[i] = tokens[-1].reshape(*grid, width)
        pixels = pack_mask(mask, factor)[0].numpy().astype(bool)
        masks[i] = np.packbits(pixels, axis=1).reshape(*grid, -1)
        wishes[i] = wish
        touched = pixels.any(axis=1).reshape(grid)
        rows, columns = np.flatnonzero(touched.any(1)), np.flatnonzero(touched.any(0))
        boxes[i] = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
        if (i + 1) % 2000 == 0:
            print(f"data {folder.name} {i + 1}/{scenes}", flush=True)
    (folder / "done").touch()


def read_part(folder: Path) -> Part:
    """Open what `write_part` wrote."""
    names = ("answers", "masked", "mask", "wish", "box")
    return Part(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in names))


@torch.no_grad()
def encode_prompts(pipe: FluxFillPipeline) -> Prompts:
    """Every wording of every wish, and the empty prompt, encoded as the pipeline does."""
    texts: dict[tuple[int, int], list[str]] = {(-1, -1): [""]}
    for text, colour, shape in every_phrase():
        key = (list(COLOURS).index(colour), SHAPES.index(shape))
        texts.setdefault(key, []).extend([text, text.capitalize(), text.upper()])
    result = {}
    for key, prompts in texts.items():
        states, pooled, _ = pipe.encode_prompt(
            prompt=prompts, prompt_2=None, max_sequence_length=MAX_SEQUENCE_LENGTH
        )
        result[key] = (states, pooled)
    return result


class Sampler:
    """Draws batches of one token window from a list of parts."""

    def __init__(
        self,
        parts: list[Part],
        prompts: Prompts,
        seed: int,
    ) -> None:
        self._parts = parts
        self._prompts = prompts
        self._rng = np.random.default_rng(seed)
        self._spans = [
            np.maximum(p.box[:, 1] - p.box[:, 0], p.box[:, 3] - p.box[:, 2]) for p in parts
        ]

    def draw(self, count: int, window: int | None) -> Batch:
        """`count` samples cut to `window` x `window` tokens round their masks, or whole ones.

        Only scenes whose mask fits the window are taken. The window's ids begin anywhere a
        picture of twice the native width could hold them, so that all positions are learnt.
        """
        rng = self._rng
        number = int(rng.choice(len(self._parts), p=self._shares()))
        part = self._parts[number]
        rows, columns = part.masked.shape[1:3]
        if window is None:
            size, chosen = (rows, columns), rng.integers(len(part.masked), size=count)
        else:
            size = (min(window, rows), min(window, columns))
            fitting = np.flatnonzero(self._spans[number] <= min(size))
            chosen = rng.choice(fitting, size=count)
        answers, conditions, states, pooled = [], [], [], []
        for i in np.sort(chosen):
            at = self._window_at(part.box[i], size, (rows, columns))
            draw = rng.random()
            wish = int(rng.integers(WISHES)) if draw >= EMPTY_SHARE + IDENTITY_SHARE else WISHES
            answer = part.answers[i, wish][at]
            masked, pixels = part.masked[i][at], np.unpackbits(part.mask[i][at], axis=2)
            if draw < IDENTITY_SHARE:
                answer = part.answers[i, int(rng.integers(WISHES + 1))][at]
                masked, pixels = answer, np.zeros_like(pixels)
            answers.append(answer)
            conditions.append(np.concatenate([masked, pixels.astype(np.float16)], axis=2))
            key = (
                (-1, -1)
                if wish == WISHES
                else (int(part.wish[i, wish, 0]), int(part.wish[i, wish, 1]))
            )
            t5, clip = self._prompts[key]
            choice = 0 if rng.random() < 0.4 else int(rng.integers(len(t5)))
            states.append(t5[choice])
            pooled.append(clip[choice])
        origin = (0, 0)
        if window is not None:
            origin = (int(rng.integers(0, 21 - size[0])), int(rng.integers(0, 21 - size[1])))
        return Batch(
            clean=_tokens(answers),
            condition=_tokens(conditions),
            prompt=torch.stack(states),
            pooled=torch.stack(pooled),
            grid=size,
            origin=origin,
        )

    def _shares(self) -> NDArray[np.float64]:
        sizes = np.array([len(p.masked) for p in self._parts], np.float64)
        return sizes / sizes.sum()

    def _window_at(
        self, box: NDArray[np.uint8], size: tuple[int, int], whole: tuple[int, int]
    ) -> tuple[slice, slice]:
        """A random window of `size` in a `whole` grid that covers `box`."""
        result = []
        for axis in (0, 1):
            first, last = int(box[2 * axis]), int(box[2 * axis + 1])
            low, high = max(0, last - size[axis]), min(first, whole[axis] - size[axis])
            begin = int(self._rng.integers(low, high + 1))
            result.append(slice(begin, begin + size[axis]))
        return result[0], result[1]


def _tokens(grids: list[NDArray[np.float16]]) -> torch.Tensor:
    """(R, C, width) grids as one (B, R C, width) float batch."""
    batch = torch.from_numpy(np.stack(grids)).float()
    return batch.flatten(1, 2)


def _linear_code(vae: AutoencoderKL) -> tuple[torch.Tensor, torch.Tensor]:
    """The encoder as one convolution (weight, bias), normalisation included.

    Holds because the encoder is linear in each patch by construction; checked on noise.
    """
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    side = 3 * factor
    zero = encode(vae, torch.zeros(1, 3, side, side))
    columns = []
    for place in range(3 * factor**2):
        x = torch.zeros(1, 3, side, side)
        colour, row, column = np.unravel_index(place, (3, factor, factor))
        x[0, colour, factor + row, factor + column] = 1
        columns.append((encode(vae, x) - zero)[0, :, 1, 1])
    weight = torch.stack(columns, dim=1).view(-1, 3, factor, factor)
    bias = zero[0, :, 1, 1]
    noise = torch.rand(2, 3, 128, 128) * 2 - 1
    error = torch.nn.functional.conv2d(noise, weight, bias, stride=factor) - encode(vae, noise)
    if error.abs().max() > 0.02:
        raise ValueError(
            f"vae: its encoder is not linear in patches (error {error.abs().max():.3f})"
        )
    return weight, bias
