#!/usr/bin/env python3
"""Bytes that one template takes, by entry kind, format and anchor stride, as a markdown table.

Counted from the model's configuration (planning/entry_bytes.py), which a test holds to what
the engine stores.

    python scripts/bytes_table.py
"""

from __future__ import annotations

import argparse
import sys

from maskserve_core.planning.entry_bytes import FORMATS, entry_bytes
from maskserve_core.planning.flops import flux_work
from maskserve_harness.benchmarks.models import FLUX_DEV


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--side", type=int, default=1024, help="pixels of the square image")
    parser.add_argument("--steps", type=int, default=28, help="of the default schedule")
    parser.add_argument("--strides", type=int, nargs="+", default=[1, 2, 4, 7, 14, 28])
    args = parser.parse_args()
    work = flux_work(FLUX_DEV, args.side // 8, args.side // 8)
    print(f"FLUX.1-dev, {args.side}x{args.side}, {args.steps} steps: GiB per template\n")
    print(
        "| kind | format | per anchor | " + " | ".join(f"stride {s}" for s in args.strides) + " |"
    )
    print("|---" * (3 + len(args.strides)) + "|")
    for kind in ("kv", "h"):
        for name in ("bfloat16", "int8", "int4"):
            each = entry_bytes(work, kind, FORMATS[name]) / 2**30
            cells = [each * len(range((s - 1) // 2, args.steps, s)) for s in args.strides]
            row = " | ".join(f"{cell:.2f}" for cell in cells)
            print(f"| {kind} | {name} | {each:.2f} | {row} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
