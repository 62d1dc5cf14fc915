"""What adapters cost: steps of a batch in which every row has a LoRA, over the same without.

    python scripts/bench bench_adapters --only lora --json adapters.json

`lora_step_ratio`: eight cached rows of FLUX's width, random weights, one double and one single
block; each row has a LoRA of its own, of rank 16, of every linear layer. Rows stay packed; steps
with and without are timed in turn, and medians compared. Steps that compute the vectors of those
ahead are among them as often as in an edit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from maskserve_engine.families.flux.vectors import AHEAD
from maskserve_harness.benchmarks.step import kept
from maskserve_harness.benchmarks.step_rig import Bench
from maskserve_harness.benchmarks.timing import Timer, hardware

ROWS, RANK, RATIO = 8, 16, 0.25


def lora_step(args: argparse.Namespace) -> dict[str, Any]:
    """Steps of ROWS rows, each with a LoRA of its own, and of none."""
    dtype, device = getattr(torch, args.dtype), torch.device(args.device)
    bench = Bench("flux-256", (1, 1), dtype, device, "model")
    bench.fill_entry("kv")
    plain, ours = ([bench.row(RATIO, seed) for seed in range(ROWS)] for _ in range(2))
    for row in ours:
        row.adapters = ((bench.lora(RANK), 0.8),)
    timer = Timer(device, args.clock)
    batches = [kept(bench, AHEAD, partial(bench.step, rows, "kv")) for rows in (plain, ours)]
    for steps in batches:
        steps()
    times = [[timer.ms(steps) / AHEAD for steps in batches] for _ in range(args.repeat)]
    without, with_loras = (statistics.median(each) for each in zip(*times, strict=True))
    return {
        "rows": ROWS,
        "rank": RANK,
        "step_ms": round(without, 2),
        "lora_step_ms": round(with_loras, 2),
        "lora_step_ratio": round(with_loras / without, 4),
    }


PARTS = {"lora": (lora_step,)}
"""What is measured, by the name that `--only` takes."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=tuple(PARTS), nargs="+", default=list(PARTS))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--repeat", type=int, default=5, help="rounds of AHEAD steps each")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    summary: dict[str, Any] = {}
    for part in args.only:
        for measure in PARTS[part]:
            summary |= measure(args)
    print("\n".join(f"{name:20} {value}" for name, value in summary.items()))
    if args.json:
        report = {
            "command": " ".join(sys.argv),
            "hardware": hardware(torch.device(args.device)),
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"),
            "summary": summary,
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0
