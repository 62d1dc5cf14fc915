#!/usr/bin/env python3
"""What a step of FLUX.1-dev at 1024x1024 should take on an H100: an estimate, nobody measured it.

Counted: FLOPs (planning/flops.py), bytes that must be read once (weights, entries), kernel launches
(docs/benchmarks/kernels.json). Assumed: the device's published peaks and the shares of them that
are reached. A step takes the longest of the three.

    python scripts/gpu_estimate.py
"""

from __future__ import annotations

import argparse
import json
import math
import sys

import torch

from maskserve_core.planning.flops import flux_work
from maskserve_harness.benchmarks.kernel_counts import DOUBLE, SINGLE, TABLE
from maskserve_harness.benchmarks.step_rig import PRESETS, build_model

PEAK_FLOPS, PEAK_BYTES = 989e12, 3.35e12
"""Of an H100 SXM: bfloat16 without sparsity, and its memory."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--flops-reached", type=float, default=0.5, help="share of the peak")
    parser.add_argument("--bytes-reached", type=float, default=0.7, help="share of the peak")
    parser.add_argument("--launch-us", type=float, default=6.0, help="of the host, per kernel")
    args = parser.parse_args()
    blocks = (DOUBLE, SINGLE)
    model = build_model("flux-1024", blocks, torch.bfloat16, torch.device("meta"))
    weights = sum(2 * p.numel() for p in model.parameters())
    (down, across), text = PRESETS["flux-1024"]["grid"], PRESETS["flux-1024"]["text"]
    work = flux_work(dict(model.config), 2 * down, 2 * across)
    launches = json.loads(TABLE.read_text(encoding="utf-8"))
    print("| batch | m | TFLOP | GB read | launches | compute ms | memory ms | host ms | step ms |")
    print("|---|---|---|---|---|---|---|---|---|")
    for batch in (1, 4, 8):
        for ratio in (None, 0.05, 0.11, 0.2, 0.35):
            rows = [work.row_at(ratio or 1.0, text)] * batch
            flops = work.step_flops(rows, "kv" if ratio else "dense")
            rest = 0.0 if ratio is None else 1.0 - ratio
            entries = batch * rest * down * across * 2 * (DOUBLE + SINGLE) * model.inner_dim
            name = "dense, 4 rows" if batch > 1 else "dense, 1 row"
            if ratio is not None:
                name = f"kv int8, {batch} row" + ("s, mixed" if batch > 1 else "")
            kernels = launches[name]["step"]
            times = (
                1e3 * flops / (PEAK_FLOPS * args.flops_reached),
                1e3 * (weights + entries) / (PEAK_BYTES * args.bytes_reached),
                1e-3 * args.launch_us * kernels,
            )
            cells = " | ".join(f"{ms:.1f}" for ms in (*times, max(times)))
            what = "dense" if ratio is None else f"{ratio:.2f}"
            gigabytes = math.ceil((weights + entries) / 1e8) / 10
            print(f"| {batch} | {what} | {flops / 1e12:.1f} | {gigabytes} | {kernels} | {cells} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
