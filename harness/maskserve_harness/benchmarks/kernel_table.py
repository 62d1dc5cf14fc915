"""How many kernels a step of FLUX.1-dev at 1024x1024 launches on CUDA, by case; needs no GPU.

The engine's own code runs on tensors that have a device but no memory;
`--write` puts the counts where tests/unit/test_fake_cuda.py holds later changes to them.

    python scripts/kernel_table.py --write
"""

from __future__ import annotations

import argparse
import json

from maskserve_harness.benchmarks.kernel_counts import CASES, TABLE, Counts, count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}, too")
    args = parser.parse_args()
    counts: dict[str, Counts] = {}
    print("| step | double block | single block | outside | step | per block |")
    print("|---|---|---|---|---|---|")
    for case in CASES:
        counts[case.name] = c = count(case)
        print(
            f"| {case.name} | {c.double:.1f} | {c.single:.1f} | {c.fixed:.0f} | {c.step} "
            f"| {c.per_block:.1f} |",
            flush=True,
        )
    if args.write:
        rows = {name: {"step": c.step, "per_block": c.per_block} for name, c in counts.items()}
        TABLE.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0
