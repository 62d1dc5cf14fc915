"""Random edits for the engine, encoded by the real encoder of a tiny model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maskserve_benchmarks.edits.direct import job_of, request_of
from maskserve_common import config_file
from maskserve_common.config import Config
from maskserve_common.config_file import laid_over
from maskserve_common.contracts.keys import template_id
from maskserve_common.contracts.request import EditKind, Reference
from maskserve_common.contracts.settings import EditSettings
from maskserve_engine.base.job import EditJob
from maskserve_engine.families.encoder import Encoder

WORDS = ("a red star", "blue circle", "", "A green square, please", "étoile", "two cats")


@dataclass(frozen=True)
class Case:
    """An edit before it is encoded."""

    pixels: NDArray[np.uint8]
    mask: NDArray[np.uint8]
    prompt: str
    settings: EditSettings
    seed: int
    kind: EditKind = "inpaint"
    references: tuple[NDArray[np.uint8], ...] = ()
    """Pictures beside the source."""

    @property
    def pictures(self) -> list[NDArray[np.uint8]]:
        return [self.pixels, *self.references]


def config_of(folder: Path, **sections: dict[str, Any]) -> Config:
    """The configuration of a model folder, with `sections` laid over it."""
    return config_file.config_of(laid_over({"model": {"path": str(folder)}}, sections))


def random_case(rng: np.random.Generator, **settings: Any) -> Case:
    """A random image of 32 to 64 pixels a side, with a random rectangular mask."""
    h, w = (int(8 * rng.integers(4, 9)) for _ in range(2))
    pixels = rng.integers(0, 256, (h, w, 3), dtype=np.uint8)
    mask = np.zeros((h, w), np.uint8)
    top, integers = int(rng.integers(0, h - 1)), int(rng.integers(0, w - 1))
    mask[top : top + int(rng.integers(1, h)), integers : integers + int(rng.integers(1, w))] = 255
    values: dict[str, Any] = {
        "num_inference_steps": int(rng.integers(1, 8)),
        "guidance_scale": float(np.round(rng.uniform(1, 30), 2)),
        "strength": float(rng.choice([1.0, 1.0, 0.8, 0.55])),
        "mask_ring": 0,
        **settings,
    }
    values["strength"] = max(values["strength"], 1.0 / values["num_inference_steps"])
    return Case(
        pixels, mask, str(rng.choice(WORDS)), EditSettings(**values), int(rng.integers(2**31))
    )


def without_mask(case: Case, kind: EditKind) -> Case:
    """The same edit as one of the whole picture, or as a picture without a source."""
    return replace(case, kind=kind, mask=np.full_like(case.mask, 255))


def guided(rng: np.random.Generator) -> dict[str, Any]:
    """Random settings of an edit with a negative prompt."""
    scale = float(np.round(rng.uniform(1.2, 6), 2))
    return {"negative_prompt": str(rng.choice(WORDS)), "true_cfg_scale": scale}


def unet_case(rng: np.random.Generator, **settings: Any) -> Case:
    """A random edit; every other edit has classifier-free guidance and a negative prompt."""
    options: dict[str, Any] = {
        "strength": float(rng.choice([1.0, 0.8, 0.55, 0.3])),
        "num_inference_steps": int(rng.integers(4, 9)),
        "guidance_scale": float(rng.choice([1.0, 7.5])),
        **settings,
    }
    if options["guidance_scale"] > 1 and "negative_prompt" not in options:
        options["negative_prompt"] = str(rng.choice(["", "x", "a red star"]))
    return random_case(rng, **options)


def encode_case(encoder: Encoder, case: Case, request_id: str) -> EditJob:
    request = request_of(case.pixels, case.prompt, case.settings, case.seed, request_id)
    request, pixels = replace(request, kind=case.kind), case.pixels
    if case.kind == "generate":
        request, pixels = replace(request, template_id="", pixels_id=""), pixels[:0, :0]
    request = replace(
        request,
        references=tuple(
            Reference((len(pixels), pixels.shape[1]), template_id(pixels))
            for pixels in case.references
        ),
    )
    return job_of(encoder, request, pixels, case.mask, case.references)


def tolerance(expected: NDArray[np.float32]) -> float:
    """The allowed distance between "equal" latents (design §8)."""
    return 1e-4 * max(1.0, float(np.abs(expected).max()))
