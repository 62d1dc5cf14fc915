"""Run the held-out edits through FluxFillPipeline, judge them, and draw the sheet."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxFillPipeline, StableDiffusionInpaintPipeline
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from maskserve_harness.demo_model.judge import Verdict, judge
from maskserve_harness.demo_model.palette import COLOURS, SHAPES
from maskserve_harness.demo_model.prompts import MAX_SEQUENCE_LENGTH
from maskserve_harness.demo_model.scenes import Edit, Picture, fill

_TILE_GAP = 4
_CAPTION = 12  # pixels under a tile


@dataclass(frozen=True)
class Result:
    """Shares of edits judged right, 0..1, in all and by what was asked."""

    edits: int
    colour: float
    shape: float
    both: float
    by_colour: dict[str, dict[str, float]]
    by_shape: dict[str, dict[str, float]]
    confusion: dict[str, dict[str, int]]
    """What was seen (`none` if nothing clear) for every shape asked for."""

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Continuation:
    """How well empty prompts were answered, against what really goes on behind the mask."""

    edits: int
    psnr_db: float
    """In the mask, mean over the edits."""
    smooth_fill_psnr_db: float
    """The same of a smooth fill from the mask's rim."""
    continued: float
    """Share of edits with less than half the smooth fill's error (root mean square)."""


def run_edits(
    pipe: FluxFillPipeline | StableDiffusionInpaintPipeline,
    edits: list[Edit],
    steps: int,
    batch: int,
    report: Callable[[int, float], None],
    **arguments: float,
) -> list[Picture]:
    """Edited pictures, the source pasted back outside each mask.

    The noise of edit i is drawn from seed i, whatever the batch size. `report` is told how
    many edits are done and the seconds spent. More `arguments` go to the pipeline's call.
    """
    if isinstance(pipe, FluxFillPipeline):
        arguments = {"max_sequence_length": MAX_SEQUENCE_LENGTH, **arguments}
    pictures: list[Picture] = []
    begin = time.monotonic()
    for first in range(0, len(edits), batch):
        some = edits[first : first + batch]
        output = pipe(
            prompt=[edit.prompt for edit in some],
            image=[Image.fromarray(edit.source) for edit in some],
            mask_image=[Image.fromarray(edit.mask.astype(np.uint8) * 255) for edit in some],
            height=some[0].source.shape[0],
            width=some[0].source.shape[1],
            num_inference_steps=steps,
            generator=[torch.Generator("cpu").manual_seed(first + i) for i in range(len(some))],
            output_type="np",
            **arguments,
        ).images
        for edit, image in zip(some, output, strict=True):
            edited = np.rint(image * 255).astype(np.uint8)
            pictures.append(np.where(edit.mask[..., None], edited, edit.source))
        report(len(pictures), time.monotonic() - begin)
    return pictures


def verdicts_of(edits: list[Edit], pictures: list[Picture]) -> list[Verdict]:
    """What the judge sees in every picture."""
    return [
        judge(picture, edit.source, edit.mask)
        for edit, picture in zip(edits, pictures, strict=True)
    ]


def score(edits: list[Edit], verdicts: list[Verdict]) -> Result:
    """How many verdicts are right; each edit says what must be seen."""
    asked_colours, asked_shapes = [e.colour or "" for e in edits], [e.shape or "" for e in edits]
    colour = np.array([v.colour == e.colour for e, v in zip(edits, verdicts, strict=True)])
    shape = np.array([v.shape == e.shape for e, v in zip(edits, verdicts, strict=True)])

    def rows(names: list[str], asked: list[str]) -> dict[str, dict[str, float]]:
        table = {}
        for name in names:
            mine = np.array([a == name for a in asked])
            if mine.any():
                table[name] = {
                    "edits": float(mine.sum()),
                    "colour": float(colour[mine].mean()),
                    "shape": float(shape[mine].mean()),
                }
        return table

    confusion = {s: dict.fromkeys([*SHAPES, "none"], 0) for s in SHAPES}
    for wanted, verdict in zip(asked_shapes, verdicts, strict=True):
        confusion[wanted][verdict.shape or "none"] += 1
    return Result(
        edits=len(edits),
        colour=float(colour.mean()),
        shape=float(shape.mean()),
        both=float((colour & shape).mean()),
        by_colour=rows(list(COLOURS), asked_colours),
        by_shape=rows(list(SHAPES), asked_shapes),
        confusion=confusion,
    )


def continuation(edits: list[Edit], pictures: list[Picture]) -> Continuation:
    """Compare `pictures` with the edits' targets, inside the masks."""
    ours = np.array([_rms(e, picture) for e, picture in zip(edits, pictures, strict=True)])
    filled = np.array([_rms(e, fill(e.source, e.mask)) for e in edits])
    return Continuation(
        edits=len(edits),
        psnr_db=float(np.mean(20 * np.log10(255 / ours))),
        smooth_fill_psnr_db=float(np.mean(20 * np.log10(255 / filled))),
        continued=float(np.mean(ours < filled / 2)),
    )


def _rms(edit: Edit, picture: NDArray[np.generic]) -> float:
    """Root mean square error in the mask, at least 0.1 of 255."""
    error = picture[edit.mask].astype(np.float64) - edit.target[edit.mask]
    return max(float(np.sqrt(np.mean(error**2))), 0.1)


def draw_sheet(
    edits: list[Edit], pictures: list[Picture], verdicts: list[Verdict], columns: int = 10
) -> Image.Image:
    """Pairs of source (mask outlined) and edited picture, the prompt beneath, red when wrong."""
    height, width = edits[0].mask.shape
    cell_w, cell_h = 2 * width + _TILE_GAP, height + _CAPTION
    rows = -(-len(edits) // columns)
    sheet = Image.new("RGB", (columns * (cell_w + _TILE_GAP), rows * (cell_h + _TILE_GAP)), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (edit, picture, verdict) in enumerate(zip(edits, pictures, verdicts, strict=True)):
        x, y = (i % columns) * (cell_w + _TILE_GAP), (i // columns) * (cell_h + _TILE_GAP)
        sheet.paste(Image.fromarray(_outlined(edit)), (x, y))
        sheet.paste(Image.fromarray(picture), (x + width, y))
        right = edit.colour is None or verdict.matches(edit.colour, edit.shape)
        text = edit.prompt or "(empty)"
        if not right:
            text += f" (saw {verdict.colour or 'no colour'}, {verdict.shape or 'no shape'})"
        draw.text((x, y + height), text, fill="black" if right else "red")
    return sheet


def save_sheet(sheet: Image.Image, path: Path, limit: int = 1_500_000) -> None:
    """Write a PNG of at most `limit` bytes, dropping low bits of the colours as needed."""
    pixels = np.asarray(sheet)
    for dropped in ((0, 0, 0), (2, 2, 2), (3, 3, 3), (3, 3, 4), (4, 4, 4), (5, 4, 5)):
        low = (1 << np.array(dropped)) - 1
        coarse = (pixels & ~low) | (low // 2)
        coarse[pixels == 255] = 255
        Image.fromarray(coarse.astype(np.uint8)).save(path, optimize=True)
        if path.stat().st_size <= limit:
            return


def _outlined(edit: Edit) -> Picture:
    """The source with the mask's rim drawn white on black."""
    mask = edit.mask
    inner = np.pad(mask, 1)
    inner = mask & inner[:-2, 1:-1] & inner[2:, 1:-1] & inner[1:-1, :-2] & inner[1:-1, 2:]
    picture = edit.source.copy()
    rim = mask & ~inner
    picture[rim] = 255
    ys, xs = np.nonzero(rim)
    dotted = (ys + xs) % 6 < 3
    picture[ys[dotted], xs[dotted]] = 0
    return picture


@torch.no_grad()
def reconstruction_psnr(vae: AutoencoderKL, pictures: list[Picture]) -> list[float]:
    """PSNR in dB of each picture after encoding and decoding."""
    result = []
    for picture in pictures:
        pixels = torch.from_numpy(picture).permute(2, 0, 1)[None]
        x = pixels.float().div_(127.5).sub_(1).to(vae.dtype)
        y = vae.decode(vae.encode(x).latent_dist.mode()).sample.clamp(-1, 1)
        mse = torch.nn.functional.mse_loss(y.float(), x.float()).item()
        result.append(10 * float(np.log10(4 / max(mse, 1e-10))))
    return result
