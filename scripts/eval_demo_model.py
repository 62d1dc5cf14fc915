"""Judge the demo model on 200 fixed held-out edits with diffusers' own FluxFillPipeline."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import FluxFillPipeline
from diffusers.utils import logging

from demo_model.evaluation import draw_sheet, run_edits, save_sheet, score
from demo_model.scenes import held_out_edits
from demo_model.vae import reconstruction_psnr

ROOT = Path(__file__).resolve().parents[1]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", type=Path, default=ROOT / "assets/models/demo", help="diffusers folder")
    add("--edits", type=int, default=200, help="how many of the fixed edits, in order")
    add("--steps", type=int, default=20, help="denoising steps")
    add("--batch", type=int, default=10, help="edits per pipeline call")
    add("--threads", type=int, default=0, help="CPU threads; 0 = torch's choice")
    add("--json", type=Path, default=None, help="write all figures here")
    add("--sheet", type=Path, default=None, help="write a picture of all edits here")
    return parser.parse_args()


def main() -> int:
    args = parse()
    logging.disable_progress_bar()
    if args.threads:
        torch.set_num_threads(args.threads)
    pipe = FluxFillPipeline.from_pretrained(args.model)
    pipe.set_progress_bar_config(disable=True)
    size = int(pipe.vae.config.sample_size)
    edits = held_out_edits(args.edits, (size, size))
    begin = time.monotonic()
    pictures = run_edits(
        pipe, edits, args.steps, args.batch,
        lambda done, seconds: print(f"{done}/{len(edits)} edits, {seconds:.0f} s", flush=True),
    )  # fmt: skip
    seconds = time.monotonic() - begin
    result, verdicts = score(edits, pictures)
    psnr = reconstruction_psnr(pipe.vae, [edit.target for edit in edits])
    figures = {
        **result.as_dict(),
        "steps": args.steps,
        "vae_psnr_db": {"mean": float(np.mean(psnr)), "p10": float(np.percentile(psnr, 10))},
        "megabytes": sum(f.stat().st_size for f in args.model.rglob("*") if f.is_file()) / 1e6,
        "seconds": seconds,
    }
    print(f"colour {result.colour:.1%}  shape {result.shape:.1%}  both {result.both:.1%}")
    print(f"VAE PSNR mean {np.mean(psnr):.2f} dB, 10th percentile {np.percentile(psnr, 10):.2f} dB")
    for table in (result.by_shape, result.by_colour):
        for name, row in table.items():
            shares = f"colour {row['colour']:6.1%} shape {row['shape']:6.1%}"
            print(f"  {name:9} n={row['edits']:3.0f} {shares}")
    for asked, seen in result.confusion.items():
        wrong = {k: v for k, v in seen.items() if v and k != asked}
        print(f"  {asked} seen as {wrong or 'nothing else'}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    if args.sheet:
        args.sheet.parent.mkdir(parents=True, exist_ok=True)
        save_sheet(draw_sheet(edits, pictures, verdicts), args.sheet)
    return 0


if __name__ == "__main__":
    sys.exit(main())
