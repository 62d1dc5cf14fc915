"""Judge the demo model on fixed held-out edits with diffusers' own FluxFillPipeline.

python scripts/bench eval_demo_model --threads 1 --json docs/benchmarks/demo-model.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxFillPipeline
from diffusers.utils import logging
from numpy.typing import NDArray

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_benchmarks.demo_model.scenes import Edit, Picture, fill
from maskserve_benchmarks.machine import machine
from maskserve_benchmarks.reports import about, table, write_json
from maskserve_studies.demo_model.edit_classes import edits_of
from maskserve_studies.demo_model.evaluation import run_edits, verdicts_of
from maskserve_studies.demo_model.relations import RELATIONS
from maskserve_studies.demo_model.structures import STRUCTURES


def shares_right(edits: Sequence[Edit], pictures: Sequence[Picture]) -> dict[str, float]:
    """Return the shares of edits whose colour, shape, and both are right."""
    verdicts = verdicts_of(list(edits), list(pictures))
    pairs = list(zip(edits, verdicts, strict=True))
    colour = np.array([verdict.colour == edit.colour for edit, verdict in pairs])
    shape = np.array([verdict.shape == edit.shape for edit, verdict in pairs])
    right = {"colour": colour, "shape": shape, "both": colour & shape}
    return {name: round(float(flags.mean()), 3) for name, flags in right.items()}


def share_continued(edits: Sequence[Edit], pictures: Sequence[Picture]) -> float:
    """Return the share of edits whose error in the mask is at most half that of a smooth fill."""
    pairs = list(zip(edits, pictures, strict=True))
    edit_rms = np.array([_rms(edit, picture) for edit, picture in pairs])
    filled = np.array([_rms(edit, fill(edit.source, edit.mask)) for edit in edits])
    return round(float(np.mean(edit_rms < filled / 2)), 3)


def _rms(edit: Edit, picture: NDArray[np.generic]) -> float:
    """Return the root mean square error in the mask, at least 0.1 of 255."""
    error = picture[edit.mask].astype(np.float64) - edit.target[edit.mask]
    return max(float(np.sqrt(np.mean(error**2))), 0.1)


@torch.no_grad()
def reconstruction_psnr(vae: AutoencoderKL, pictures: Sequence[Picture]) -> list[float]:
    """Return the PSNR in dB of each picture after encoding and decoding."""
    psnrs = []
    for picture in pictures:
        x = torch.from_numpy(picture).permute(2, 0, 1)[None].float().div_(127.5).sub_(1)
        y = vae.decode(vae.encode(x.to(vae.dtype)).latent_dist.mode()).sample.clamp(-1, 1)
        mse = torch.nn.functional.mse_loss(y.float(), x).item()
        psnrs.append(10 * float(np.log10(4 / max(mse, 1e-10))))
    return psnrs


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--model", type=Path, default=DEMO_MODEL, help="diffusers folder")
    add("--edits", type=int, default=200, help="with named objects, in order")
    add("--far-edits", type=int, default=48, help="of each relation and structure")
    add("--steps", type=int, default=20)
    add("--batch", type=int, default=10, help="edits of a pipeline's call")
    add("--threads", type=int, default=0, help="0: torch's choice")
    add("--json", type=Path)
    args = parser.parse_args()
    logging.disable_progress_bar()
    if args.threads:
        torch.set_num_threads(args.threads)
    pipe = FluxFillPipeline.from_pretrained(args.model)
    pipe.set_progress_bar_config(disable=True)
    size = (int(pipe.vae.config.sample_size),) * 2
    begin, lines = time.monotonic(), dict[str, Any]()
    for name in ("named", *RELATIONS, *STRUCTURES):
        count = args.edits if name == "named" else args.far_edits
        edits = edits_of(name, count, size) if count else []
        if not edits:
            continue
        pictures = run_edits(pipe, edits, args.steps, args.batch)
        if name in STRUCTURES:
            lines[name] = {"edits": len(edits), "continued": share_continued(edits, pictures)}
        else:
            lines[name] = {"edits": len(edits), **shares_right(edits, pictures)}
        print(name, *lines[name].values(), flush=True)
    psnr = reconstruction_psnr(pipe.vae, [edit.target for edit in edits_of("named", 20, size)])
    files = [file.stat().st_size for file in args.model.rglob("*") if file.is_file()]
    report = {
        **about(machine()),
        "steps": args.steps,
        "classes": lines,
        "vae_psnr_db": round(float(np.mean(psnr)), 2),
        "megabytes": round(sum(files) / 1e6, 1),
        "seconds": round(time.monotonic() - begin, 1),
    }
    columns = ["edits", "colour", "shape", "both", "continued"]
    rows = [[name, *(line.get(column, "") for column in columns)] for name, line in lines.items()]
    print(table(["class", *columns], rows))
    print(f"VAE {report['vae_psnr_db']} dB, folder {report['megabytes']} MB")
    write_json(report, args.json)
    return 0
