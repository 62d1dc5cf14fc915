#!/usr/bin/env python3
"""What a step of FLUX.1-dev at 1024x1024 should take on an H100: an estimate, nobody measured it.

Counted: FLOPs (planning/flops.py), the bytes that every kernel reads and writes, and launches
(scripts/kernel_table.py). Assumed: the device's published peaks and the shares of them that are
reached. Products and attention take what their FLOPs or their bytes take, whichever is longer; all
other kernels take what their bytes take, after them. A step takes that, or what the host takes to
ask for it.

    python scripts/gpu_estimate.py
"""

from __future__ import annotations

import argparse
import sys

from maskserve_harness.benchmarks.estimate import PEAK_BYTES, PEAK_FLOPS, steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
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
        others = 1e3 * step.others / bandwidth
        host = 1e-3 * args.launch_us * step.launches
        cells = " | ".join(f"{ms:.1f}" for ms in (needed, others, host, max(needed + others, host)))
        what = "dense" if step.ratio is None else f"{step.ratio:.2f}"
        print(
            f"| {step.rows} | {what} | {step.flops / 1e12:.1f} | {step.needed / 1e9:.1f} "
            f"| {step.others / 1e9:.1f} | {step.held / 1e9:.1f} | {step.launches} | {cells} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
