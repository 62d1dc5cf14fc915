"""Judge the photo model by held-out edits through diffusers' pipeline: rims, likeness, words, the
VAE, the time of an edit. Writes a sheet of the edits, and a blind sheet with another model.

The blind sheet shows each source, then both answers in a random order. Only its key has the order.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxFillPipeline
from diffusers.utils import logging
from PIL import Image, ImageDraw

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_benchmarks.demo_model.scenes import Edit, Picture, fill, to_bytes
from maskserve_studies.demo_model.evaluation import run_edits
from maskserve_studies.photo_model.edits import KINDS, SIZE, PhotoEdit, photo_edits
from maskserve_studies.photo_model.judge import psnr, recognise, rim_step
from maskserve_studies.photo_model.scenes import HELD_OUT_PHOTOS, Textures
from maskserve_studies.photo_model.sources import textures

_TILE: Final = 256
_PAIRS: Final = {"fill": 14, "pattern": 6, "shape": 20}
"""Edits of the blind sheet by kind. Both models know the words of these kinds."""


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--model", type=Path, default=DEMO_MODEL.with_name("demo-photo"), help="its folder")
    add("--edits", type=int, default=24, help="of each kind")
    add("--side", type=int, default=SIZE[0], help="of the pictures in pixels, in multiples of 16")
    add("--steps", type=int, default=12, help="of each edit")
    add("--threads", type=int, default=2, help="CPU threads")
    add("--json", type=Path, help="figures to write")
    add("--sheet", type=Path, help="PNG of four edits of each kind to write")
    add("--beside", type=Path, help="another model, for a blind sheet of 40 pairs")
    add("--blind", type=Path, help="PNG of the blind sheet to write; its key is beside it, as JSON")
    args = parser.parse_args()
    if (args.beside is None) != (args.blind is None):
        parser.error("--beside and --blind go together")
    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    grounds = textures()
    pipe = FluxFillPipeline.from_pretrained(args.model, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    size = args.side, args.side
    edits = {kind: photo_edits(kind, args.edits, grounds, size) for kind in KINDS if args.edits}
    begun = time.perf_counter()
    pictures = {
        kind: run_edits(pipe, list(edit_list), args.steps, 1) for kind, edit_list in edits.items()
    }
    seconds = (time.perf_counter() - begun) / max(1, len(KINDS) * args.edits)
    if args.edits:
        report = {
            **figures(edits, pictures, grounds),
            "vae_psnr_db": vae_likeness(pipe.vae, args.side),
            "seconds_per_edit": seconds,
            "folder_mb": sum(f.stat().st_size for f in args.model.rglob("*") if f.is_file()) / 1e6,
        }
        print(json.dumps(report, indent=1))
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.sheet:
        rows = [
            (edit, [picture])
            for kind in edits
            for edit, picture in list(zip(edits[kind], pictures[kind], strict=True))[:4]
        ]
        sheet(rows, 4).save(args.sheet)
    if args.blind:
        other_pipe = FluxFillPipeline.from_pretrained(args.beside, torch_dtype=torch.float32)
        other_pipe.set_progress_bar_config(disable=True)
        edit_list = [
            edit for kind, n in _PAIRS.items() for edit in photo_edits(kind, n, grounds, size)
        ]
        blind_sheet(pipe, other_pipe, args.steps, edit_list, args.blind)
    return 0


def figures(
    edits: dict[str, list[PhotoEdit]], pictures: dict[str, list[Picture]], grounds: Textures
) -> dict[str, Any]:
    """Rims, likeness and words of edited pictures, by kind."""
    report: dict[str, Any] = {}
    for kind, kind_edits in edits.items():
        pairs = list(zip(kind_edits, pictures[kind], strict=True))
        rim = np.mean([rim_step(picture, edit.mask) for edit, picture in pairs])
        plain = np.mean([rim_step(edit.target, edit.mask) for edit in kind_edits])
        part: dict[str, float] = {"rim_beside_untouched": float(rim / plain)}
        part["psnr_db"] = float(np.mean([psnr(p, e.target, e.mask) for e, p in pairs]))
        smooth = [psnr(to_bytes(fill(e.source, e.mask)), e.target, e.mask) for e in kind_edits]
        part["psnr_db_of_a_smooth_fill"] = float(np.mean(smooth))
        if kind not in ("fill", "pattern"):
            right = [recognise(p, e.source, e.mask, grounds) == e.wish for e, p in pairs]
            part["words_followed"] = float(np.mean(right))
        report[kind] = part
    right = [part["words_followed"] for part in report.values() if "words_followed" in part]
    report["words_followed"] = float(np.mean(right)) if right else None
    return report


@torch.no_grad()
def vae_likeness(vae: AutoencoderKL, side: int) -> float:
    """Mean PSNR in dB of each held-out photograph's middle, `side` pixels square at most, coded
    and decoded.
    """
    psnrs = []
    for path in HELD_OUT_PHOTOS:
        with Image.open(path) as image:
            square = min(*image.size, side) // 16 * 16
            left, top = (image.width - square) // 2, (image.height - square) // 2
            box = (left, top, left + square, top + square)
            photo = np.asarray(image.convert("RGB").crop(box))
        x = torch.from_numpy(photo.copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
        y = vae.decode(vae.encode(x).latent_dist.mode()).sample[0].permute(1, 2, 0)
        decoded = to_bytes(((y + 1) * 127.5).numpy())
        psnrs.append(psnr(decoded, photo, np.ones(photo.shape[:2], np.bool_)))
    return float(np.mean(psnrs))


def blind_sheet(
    pipe: FluxFillPipeline, other: FluxFillPipeline, steps: int, edits: list[PhotoEdit], path: Path
) -> None:
    """Write the pairs to `path`. A JSON file beside it has the position of the first model in each
    pair.
    """
    first_pictures = run_edits(pipe, list(edits), steps, 1)
    side = int(other.vae.config.sample_size)
    small = [_reduced(edit, side) for edit in edits]
    other_pictures = [
        np.where(edit.mask[..., None], _enlarged(picture, edit.source.shape), edit.source)
        for edit, picture in zip(edits, run_edits(other, small, 20, 1), strict=True)
    ]
    first = np.random.default_rng(len(edits)).random(len(edits)) < 0.5
    rows = [
        (edit, [a, b] if swap else [b, a])
        for edit, a, b, swap in zip(edits, first_pictures, other_pictures, first, strict=True)
    ]
    sheet(rows, 2).save(path)
    key = ["left" if swap else "right" for swap in first]
    path.with_suffix(".json").write_text(json.dumps(key) + "\n")


def sheet(rows: list[tuple[PhotoEdit, list[Picture]]], columns: int) -> Image.Image:
    """Each edit's source with its region outlined, then the pictures, then number and prompt."""
    wide = (1 + len(rows[0][1])) * (_TILE + 4) + 12
    lines = -(-len(rows) // columns)
    page = Image.new("RGB", (columns * wide, lines * (_TILE + 20)), "white")
    draw = ImageDraw.Draw(page)
    for number, (edit, pictures) in enumerate(rows):
        x, y = number % columns * wide, number // columns * (_TILE + 20)
        inside = edit.mask
        for axis in (0, 1):
            inside = inside & np.roll(edit.mask, 3, axis) & np.roll(edit.mask, -3, axis)
        outlined = np.where((edit.mask & ~inside)[..., None], np.uint8(255), edit.source)
        for column, picture in enumerate([outlined, *pictures]):
            tile = Image.fromarray(picture).resize((_TILE, _TILE), Image.Resampling.LANCZOS)
            page.paste(tile, (x + column * (_TILE + 4), y))
        draw.text((x, y + _TILE + 3), f"{number + 1}: {edit.prompt!r}", "black")
    return page


def _reduced(edit: PhotoEdit, side: int) -> Edit:
    """The edit at a model's own size."""
    source, target = (
        np.asarray(Image.fromarray(picture).resize((side, side), Image.Resampling.BOX))
        for picture in (edit.source, edit.target)
    )
    part = Image.fromarray(edit.mask.astype(np.uint8) * 255).resize((side, side))
    prompt = "" if edit.wish.look == "" else f"a {edit.wish.look} {edit.wish.thing}"
    return Edit(source, np.asarray(part) > 0, prompt, None, None, target)


def _enlarged(picture: Picture, shape: tuple[int, ...]) -> Picture:
    size = (shape[1], shape[0])
    return np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BICUBIC))


if __name__ == "__main__":
    raise SystemExit(main())
