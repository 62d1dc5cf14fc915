"""What cached activations cost in quality, measured against diffusers' own output.

Every edit of the demo model's held-out set is made by diffusers' FluxFillPipeline, by our dense
rows, by cached rows (entry kind x format x stride), by the masked tokens alone (FlashPS Fig. 1) and
by diffusers' FirstBlockCache at an equal saving. Writes JSON, a table, a plot of quality over bytes
and a sheet of pictures.

    python scripts/eval_quality.py --n 200 --json quality.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from demo_model.evaluation import run_edits
from demo_model.scenes import held_out_edits
from maskserve_harness.benchmarks.timing import hardware
from maskserve_harness.checkout import DEMO_MODEL
from maskserve_harness.quality.metrics import Picture, compare
from maskserve_harness.quality.published import missing, published
from maskserve_harness.quality.report import draw_sheet, plot, table
from maskserve_harness.quality.rivals import first_block_cache
from maskserve_harness.quality.systems import CacheChoice, Rig

DEFAULT = CacheChoice("kv", "int8", 7)


def choices(sweep: bool) -> list[CacheChoice]:
    """The default first; with `sweep` every format by stride, and `h` entries."""
    found = [DEFAULT]
    if sweep:
        for kind, formats in (
            ("kv", ("model", "int8", "float8", "int4")),
            ("h", ("model", "int8")),
        ):
            for format in formats:
                for stride in (1, 2, 4, 7, 20):
                    if format in ("model", "int8") or stride in (1, 4, 7):
                        found.append(CacheChoice(kind, format, stride))
    return list(dict.fromkeys(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--n", type=int, default=200, help="edits (default 200)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--no-sweep", action="store_true", help="only the default cache choice")
    parser.add_argument("--no-fbcache", action="store_true", help="leave FirstBlockCache out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="PNG of quality over bytes per template")
    parser.add_argument("--sheet", type=Path, help="PNG of edits by system")
    parser.add_argument("--clip", type=Path, help="folder of a CLIP model, for the CLIP score")
    parser.add_argument("--fid", type=Path, help="Inception weights of torch-fidelity, for FID")
    args = parser.parse_args()

    from diffusers import FluxFillPipeline

    edits = held_out_edits(args.n)
    rig = Rig(args.model, args.steps)
    jobs = rig.jobs(edits)
    pipe = FluxFillPipeline.from_pretrained(str(args.model))
    pipe.set_progress_bar_config(disable=True)

    def said(what: str) -> None:
        print(f"{time.strftime('%H:%M:%S')}  {what}", flush=True)

    said(f"{args.n} edits, {args.steps} steps: diffusers")
    reference = run_edits(pipe, edits, args.steps, 8, lambda done, seconds: None)
    pictures: dict[str, list[Picture]] = {"diffusers": reference}
    facts: dict[str, dict[str, Any]] = {"diffusers": compare(edits, reference, reference).as_dict()}

    def keep(name: str, made: list[Picture], **more: Any) -> None:
        pictures[name] = made
        facts[name] = {**compare(edits, made, reference).as_dict(), **more}
        said(f"{name}: {facts[name]}")

    keep("dense", rig.dense(edits, jobs))
    speedup = rig.flop_speedup(jobs, "kv")
    keep("masked_tokens_alone", rig.alone(edits, jobs))
    entries = rig.entries(jobs)
    for choice in choices(not args.no_sweep):
        keep(
            choice.name,
            rig.cached(edits, jobs, entries, choice),
            bytes_per_template=rig.template_bytes(choice, entries[0]),
            flop_speedup=round(
                rig.flop_speedup(jobs, "kv" if choice.kind == "kv" else "project"), 3
            ),
            default=choice == DEFAULT,
        )
    if not args.no_fbcache:
        made, threshold, saving = first_block_cache(
            pipe,
            lambda n: run_edits(pipe, edits[:n], args.steps, 1, lambda done, seconds: None),
            args.n,
            speedup,
        )
        keep("first_block_cache", made, threshold=threshold, block_call_saving=round(saving, 3))

    systems = {
        name: {
            **published(edits, made, reference, args.clip, args.fid),
            **facts[name],
        }
        for name, made in pictures.items()
    }
    ratios = [float(np.mean(edit.mask)) for edit in edits]
    report = {
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware(torch.device("cpu")),
        "edits": args.n,
        "steps": args.steps,
        "mean_mask_ratio": round(float(np.mean(ratios)), 4),
        "default": DEFAULT.name,
        "note": missing(args.clip, args.fid),
        "systems": systems,
    }
    print(table(systems))
    print(report["note"])
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if args.plot:
        plot(systems, args.plot)
    if args.sheet:
        names = ["diffusers", DEFAULT.name, "masked_tokens_alone", "first_block_cache"]
        draw_sheet(edits, {n: pictures[n] for n in names if n in pictures}, args.sheet)
    return 0
