"""Estimate a step of FLUX.1-dev at 1024x1024 on an H100. Nobody measured it.

Counted: FLOPs (planning/flops.py), the bytes that every kernel reads and writes, and launches
(kernel_counts.py). Assumed: the device's published peaks and the shares of them that are reached.
Products and attention take the time of their FLOPs or of their bytes, whichever is longer. All
other kernels take the time of their bytes, after them. A step takes that time, or the host's time
to launch it if that is longer.

    python scripts/bench gpu_estimate
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import NamedTuple

import torch

from maskserve_benchmarks.steps.step_rig import PRESETS, build_model
from maskserve_engine.families.flux.spec import flux_work
from maskserve_engine.fitting.memory import peak_values
from maskserve_studies.kernels.kernel_counts import (
    DOUBLE,
    NEEDED,
    SINGLE,
    TABLE,
    Case,
    moved_bytes,
)

PEAK_FLOPS, PEAK_BYTES = 989e12, 3.35e12
"""Peaks of an H100 SXM: FLOP/s in bfloat16 without sparsity, and bytes of its memory per second."""


class Step(NamedTuple):
    """Counted work of one step of FLUX.1-dev at 1024x1024, entries in int8 on the device."""

    rows: int
    ratio: float | None
    """Mask ratio of the rows; None: dense rows."""
    flops: float
    needed: int
    """Bytes of products and attention. Their kernels move these bytes while they compute."""
    other_bytes: int
    """Bytes of all other kernels, which compute almost nothing."""
    launches: int
    peak_bytes: int
    """Bytes that the memory table counts for this many rows, dense or not."""


def steps() -> Iterator[Step]:
    """Steps by rows and mask ratio; takes a minute."""
    model = build_model("flux-1024", (DOUBLE, SINGLE), torch.bfloat16, torch.device("meta"))
    (down, across), text = PRESETS["flux-1024"]["grid"], PRESETS["flux-1024"]["text"]
    work = flux_work(dict(model.config), 2 * down, 2 * across)
    launches = json.loads(TABLE.read_text(encoding="utf-8"))
    for rows in (1, 4, 8):
        for ratio in (None, 0.05, 0.11, 0.2, 0.35):
            totals = [work.row_at(ratio or 1.0, text)] * rows
            flops = work.step_flops(totals, "kv" if ratio else "dense")
            name = "dense, 4 rows" if rows > 1 else "dense, 1 row"
            if ratio is not None:
                name = f"kv int8, {rows} rows, mixed" if rows > 1 else "kv int8, 1 row"
            moved = moved_bytes(Case(name, (ratio,) * rows))
            needed = sum(moved[group] for group in NEEDED)
            peak_bytes = 2 * peak_values(work, rows, text)
            other_bytes = moved.total() - needed
            yield Step(rows, ratio, flops, needed, other_bytes, launches[name]["step"], peak_bytes)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--flops-reached", type=float, default=0.5, help="share of the peak")
    parser.add_argument("--bytes-reached", type=float, default=0.7, help="share of the peak")
    parser.add_argument("--launch-us", type=float, default=6.0, help="of the host, per kernel")
    args = parser.parse_args()
    counted = ("batch", "m", "TFLOP", "their GB", "other GB", "GB held", "launches")
    estimated = ("products, attention ms", "others ms", "host ms", "step ms")
    print(f"| {' | '.join((*counted, *estimated))} |")
    print("|---" * len((*counted, *estimated)) + "|")
    bandwidth = PEAK_BYTES * args.bytes_reached
    for step in steps():
        needed = 1e3 * max(step.flops / (PEAK_FLOPS * args.flops_reached), step.needed / bandwidth)
        other_ms = 1e3 * step.other_bytes / bandwidth
        host = 1e-3 * args.launch_us * step.launches
        cells = " | ".join(
            f"{ms:.1f}" for ms in (needed, other_ms, host, max(needed + other_ms, host))
        )
        label = "dense" if step.ratio is None else f"{step.ratio:.2f}"
        print(
            f"| {step.rows} | {label} | {step.flops / 1e12:.1f} | {step.needed / 1e9:.1f} "
            f"| {step.other_bytes / 1e9:.1f} | {step.peak_bytes / 1e9:.1f} | {step.launches} "
            f"| {cells} |",
            flush=True,
        )
    return 0
