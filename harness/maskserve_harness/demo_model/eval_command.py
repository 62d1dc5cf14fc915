"""Judge the demo model on fixed held-out edits with diffusers' own FluxFillPipeline."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from diffusers import FluxFillPipeline
from diffusers.utils import logging

from maskserve_harness.checkout import DEMO_MODEL
from maskserve_harness.demo_model.edit_classes import edits_of
from maskserve_harness.demo_model.evaluation import (
    Result,
    continuation,
    draw_sheet,
    reconstruction_psnr,
    run_edits,
    save_sheet,
    score,
    verdicts_of,
)
from maskserve_harness.demo_model.relations import RELATIONS
from maskserve_harness.demo_model.scenes import Edit, Picture
from maskserve_harness.demo_model.structures import STRUCTURES


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", type=Path, default=DEMO_MODEL, help="diffusers folder")
    add("--edits", type=int, default=200, help="how many edits with named objects, in order")
    add("--far-edits", type=int, default=48, help="how many of each relation and structure")
    add("--steps", type=int, default=20, help="denoising steps")
    add("--batch", type=int, default=10, help="edits per pipeline call")
    add("--threads", type=int, default=0, help="CPU threads; 0 = torch's choice")
    add("--json", type=Path, default=None, help="write all figures here")
    add("--sheet", type=Path, default=None, help="write a picture of the named edits here")
    add("--far-sheet", type=Path, default=None, help="the same of relations and structures")
    return parser.parse_args()


def main() -> int:
    args = parse()
    logging.disable_progress_bar()
    if args.threads:
        torch.set_num_threads(args.threads)
    pipe = FluxFillPipeline.from_pretrained(args.model)
    pipe.set_progress_bar_config(disable=True)
    size = int(pipe.vae.config.sample_size)
    begin = time.monotonic()
    edits = edits_of("named", args.edits, (size, size))
    pictures = _run(pipe, edits, args, "named")
    seconds = time.monotonic() - begin
    result = score(edits, verdicts_of(edits, pictures))
    psnr = reconstruction_psnr(pipe.vae, [edit.target for edit in edits])
    _print(result)
    print(f"VAE PSNR mean {np.mean(psnr):.2f} dB, 10th percentile {np.percentile(psnr, 10):.2f} dB")
    relations: dict[str, dict[str, object]] = {}
    structures: dict[str, dict[str, object]] = {}
    far: list[tuple[Edit, Picture]] = []
    for name in (*RELATIONS, *STRUCTURES) if args.far_edits else ():
        some = edits_of(name, args.far_edits, (size, size))
        made = _run(pipe, some, args, name)
        far += zip(some, made, strict=True)
        if name in RELATIONS:
            told = score(some, verdicts_of(some, made))
            shares = {"colour": told.colour, "shape": told.shape, "both": told.both}
            print(f"{name:12} " + "  ".join(f"{k} {v:.1%}" for k, v in shares.items()))
            relations[name] = {"edits": len(some), **shares}
        else:
            goes_on = continuation(some, made)
            print(f"{name:12} {goes_on}")
            structures[name] = asdict(goes_on)
    figures = {
        **result.as_dict(),
        "relations": relations,
        "structures": structures,
        "steps": args.steps,
        "vae_psnr_db": {"mean": float(np.mean(psnr)), "p10": float(np.percentile(psnr, 10))},
        "megabytes": sum(f.stat().st_size for f in args.model.rglob("*") if f.is_file()) / 1e6,
        "seconds": seconds,
    }
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    for path, pairs in ((args.sheet, zip(edits, pictures, strict=True)), (args.far_sheet, far)):
        if path:
            _write_sheet(path, list(pairs))
    return 0


def _run(
    pipe: FluxFillPipeline, edits: list[Edit], args: argparse.Namespace, name: str
) -> list[Picture]:
    def report(done: int, seconds: float) -> None:
        print(f"{name} {done}/{len(edits)} edits, {seconds:.0f} s", flush=True)

    return run_edits(pipe, edits, args.steps, args.batch, report)


def _print(result: Result) -> None:
    print(f"colour {result.colour:.1%}  shape {result.shape:.1%}  both {result.both:.1%}")
    for table in (result.by_shape, result.by_colour):
        for name, row in table.items():
            shares = f"colour {row['colour']:6.1%} shape {row['shape']:6.1%}"
            print(f"  {name:9} n={row['edits']:3.0f} {shares}")
    for asked, seen in result.confusion.items():
        wrong = {k: v for k, v in seen.items() if v and k != asked}
        print(f"  {asked} seen as {wrong or 'nothing else'}")


def _write_sheet(path: Path, pairs: list[tuple[Edit, Picture]]) -> None:
    edits, pictures = [edit for edit, _ in pairs], [picture for _, picture in pairs]
    path.parent.mkdir(parents=True, exist_ok=True)
    save_sheet(draw_sheet(edits, pictures, verdicts_of(edits, pictures)), path)
