"""What adapters cost: steps of a batch in which every row has a LoRA, over the same without.

    python scripts/bench bench_adapters --only lora --json adapters.json

`lora_step_ratio`: eight cached rows of FLUX's width, random weights, one double and one single
block; each row has a LoRA of its own, of rank 16, of every linear layer. Rows stay packed; steps
with and without are timed in turn, and medians compared. Steps that compute the vectors of those
ahead are among them as often as in an edit.

    python scripts/bench bench_adapters --only control --json adapters.json

`control_flux`: a cached row of FLUX's width (one double and three single blocks; mask ratio 0.11)
whose ControlNet of a quarter of its depth, as those of 5 and 10 blocks for FLUX.1, computes the
active tokens, and all of them at one step in `[controls] refresh`; over the same row without.
Beside it: the net computing all tokens at every step, and both as counted in FLOPs.
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

from maskserve_core.config_tables import ControlsConfig
from maskserve_core.models.flux import flux_work
from maskserve_engine.families.flux.vectors import AHEAD
from maskserve_harness.benchmarks.step import kept
from maskserve_harness.benchmarks.step_rig import Bench
from maskserve_harness.benchmarks.timing import Timer, hardware

ROWS, RANK, RATIO = 8, 16, 0.25
CONTROL_RATIO, CONTROL_BLOCKS, NET_BLOCKS = 0.11, (1, 3), (0, 1)


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


def control_step(args: argparse.Namespace) -> dict[str, Any]:
    """A cached row without control, with mask-aware control, and with dense control."""
    dtype, device = getattr(torch, args.dtype), torch.device(args.device)
    bench = Bench("flux-256", CONTROL_BLOCKS, dtype, device, "model")
    bench.fill_entry("kv")
    net, refresh = bench.control_net(NET_BLOCKS), args.refresh
    plain, ours, dense = (bench.row(CONTROL_RATIO, 0) for _ in range(3))
    bench.add_control(ours, net, refresh)
    bench.add_control(dense, net, 1)
    timer = Timer(device, args.clock)
    batches = [
        kept(bench, refresh, partial(bench.step, [row], "kv")) for row in (plain, ours, dense)
    ]
    for steps in batches:
        steps()
    times = [[timer.ms(steps) / refresh for steps in batches] for _ in range(args.repeat)]
    without, sparse, whole = (statistics.median(each) for each in zip(*times, strict=True))
    base = bench.work.row_at(CONTROL_RATIO, bench.text)
    own = flux_work(dict(net.config), 2 * bench.grid[0], 2 * bench.grid[1])
    active = own.step_flops([own.row_at(CONTROL_RATIO, bench.text)], "kv")
    everything = own.step_flops([own.row_at(CONTROL_RATIO, bench.text)], "dense")
    step = bench.work.step_flops([base], "kv")
    counted = 1 + (everything + (refresh - 1) * active) / refresh / step
    return {
        "control_refresh": refresh,
        "control_none_ms": round(without, 2),
        "control_flux": round(sparse / without, 3),
        "control_flux_dense": round(whole / without, 3),
        "control_flux_counted": round(counted, 3),
        "control_flux_dense_counted": round(1 + everything / step, 3),
    }


PARTS = {"lora": (lora_step,), "control": (control_step,)}
"""What is measured, by the name that `--only` takes."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=tuple(PARTS), nargs="+", default=list(PARTS))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--repeat", type=int, default=5, help="rounds of AHEAD steps each")
    parser.add_argument("--refresh", type=int, default=ControlsConfig().refresh)
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
