"""Training samples: drawn scenes as packed latents in memory-mapped files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from diffusers import AutoencoderKL
from numpy.typing import NDArray

from maskserve_benchmarks.demo_model.palette import COLOURS, SHAPES
from maskserve_benchmarks.demo_model.prompts import SAME
from maskserve_benchmarks.demo_model.scenes import Mask, Scene, finish, make_scene, to_bytes
from maskserve_studies.demo_model.relations import (
    RELATIONS,
    Wish,
    draw_wish,
    make_relational_scene,
)
from maskserve_studies.demo_model.structures import STRUCTURES, make_structure
from maskserve_studies.training.transformer import pack, pack_mask
from maskserve_studies.training.vae import to_tensor

KINDS: Final = ("plain", "relations", "structures")
WISHES: Final = {"plain": 3, "relations": len(RELATIONS), "structures": 0}
"""Objects drawn per scene. One further answer is the scene without an object."""
PROMPT_COLOURS: Final = (*COLOURS, SAME)  # colours that a prompt may name, by number
PROMPT_SHAPES: Final = (*SHAPES, SAME)


@dataclass(frozen=True)
class Part:
    """Scenes of one kind and picture size. Arrays are (scenes, rows, columns, ...) of tokens."""

    kind: str
    answers: NDArray[np.float16]
    """(S, wishes + 1, R, C, 4 channels). The last answer has no object."""
    masked: NDArray[np.float16]
    """(S, R, C, 4 channels): the masked source."""
    mask: NDArray[np.uint8]
    """(S, R, C, factor² / 2): mask pixels, packed 8 to a byte."""
    wish: NDArray[np.uint8]
    """(S, wishes, 4): colour and shape numbers of the answer, then those in the prompt."""
    box: NDArray[np.uint8]
    """(S, 4): first and last + 1 row, first and last + 1 column that the mask touches."""
    other: NDArray[np.uint8]
    """(S, 6): the box of a relational scene's other object, then its colour and shape; zeros for
    other scenes.
    """


@dataclass(frozen=True)
class _DrawnScene:
    scene: Scene
    wishes: list[Wish]
    other: tuple[int, ...]


@torch.no_grad()
def encode(vae: AutoencoderKL, pictures: torch.Tensor) -> torch.Tensor:
    """(B, 3, H, W) in -1..1 as normalised latents (B, C, h, w), using the mode of the posterior."""
    latents = vae.encode(pictures).latent_dist.mode()
    return (latents - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor


def write_part(
    vae: AutoencoderKL, folder: Path, kind: str, size: tuple[int, int], scenes: int, seed: int
) -> None:
    """Draw and encode `scenes` scenes of `size` (height, width) into `folder`. Existing
    files stay.
    """
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

    answers = create("answers", np.float16, WISHES[kind] + 1, *grid, width)
    masked = create("masked", np.float16, *grid, width)
    masks = create("mask", np.uint8, *grid, factor**2 // 2)
    wishes = create("wish", np.uint8, WISHES[kind], 4)
    boxes = create("box", np.uint8, 4)
    far_objects = create("other", np.uint8, 6)
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    kernel = linear_code(vae)
    for i in range(scenes):
        drawn = _draw(rng, kind, size, 2 * factor)
        scene = drawn.scene
        pictures = [finish(scene, wish.colour, wish.shape) for wish in drawn.wishes]
        mask = torch.from_numpy(scene.mask.astype(np.float32))[None]
        x = to_tensor([*pictures, to_bytes(scene.background), scene.source])
        x[-1] *= 1 - mask
        tokens = (
            pack(torch.nn.functional.conv2d(x, *kernel, stride=factor)).numpy().astype(np.float16)
        )
        answers[i] = tokens[:-1].reshape(-1, *grid, width)
        masked[i] = tokens[-1].reshape(*grid, width)
        pixels = pack_mask(mask, factor)[0].numpy().astype(bool)
        masks[i] = np.packbits(pixels, axis=1).reshape(*grid, -1)
        for k, wish in enumerate(drawn.wishes):
            wishes[i, k] = (
                PROMPT_COLOURS.index(wish.colour), PROMPT_SHAPES.index(wish.shape),
                PROMPT_COLOURS.index(wish.prompt_words[0]),
                PROMPT_SHAPES.index(wish.prompt_words[1]),
            )  # fmt: skip
        boxes[i] = _box(pixels.any(axis=1).reshape(grid))
        far_objects[i] = drawn.other
        if (i + 1) % 1000 == 0:
            print(f"data {folder.name} {i + 1}/{scenes}", flush=True)
    (folder / "done").touch()


def read_part(folder: Path) -> Part:
    """Open the files that `write_part` wrote."""
    names = ("answers", "masked", "mask", "wish", "box", "other")
    arrays = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in names)
    return Part(folder.name.split("-")[0], *arrays)


def _draw(rng: np.random.Generator, kind: str, size: tuple[int, int], token: int) -> _DrawnScene:
    """A scene of `kind` and its wishes; `token` is a token's side in pixels."""
    if kind == "structures":
        return _DrawnScene(make_structure(rng, size, str(rng.choice(STRUCTURES))), [], (0,) * 6)
    if kind == "plain":
        scene = make_scene(rng, size)
        pairs = [(str(rng.choice(list(COLOURS))), str(rng.choice(SHAPES))) for _ in range(3)]
        return _DrawnScene(scene, [Wish(pair, *pair) for pair in pairs], (0,) * 6)
    while True:
        drawn = make_relational_scene(rng, size)
        wishes = [w for r in RELATIONS if (w := draw_wish(rng, drawn, r)) is not None]
        if len(wishes) == len(RELATIONS):
            break
    (x, y), r = drawn.centre, drawn.radius
    far_object = (
        math.floor((y - r) / token), math.ceil((y + r) / token),
        math.floor((x - r) / token), math.ceil((x + r) / token),
        PROMPT_COLOURS.index(drawn.colour), PROMPT_SHAPES.index(drawn.shape),
    )  # fmt: skip
    return _DrawnScene(drawn.scene, wishes, far_object)


def _box(touched: Mask) -> tuple[int, ...]:
    """First and last + 1 row, first and last + 1 column of a token grid's true cells."""
    rows, columns = np.flatnonzero(touched.any(1)), np.flatnonzero(touched.any(0))
    return (int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1)


@torch.no_grad()
def linear_code(vae: AutoencoderKL) -> tuple[torch.Tensor, torch.Tensor]:
    """The encoder as one convolution (weight, bias), normalisation included.

    This holds because the encoder is linear in each patch by construction. It is checked on noise.
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
