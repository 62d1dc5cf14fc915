"""Count the kernels that a step of FLUX.1-dev or of a UNet launches on CUDA, by case. It needs no
GPU.

The engine's own code runs on tensors that have a device but no memory. `--write` saves the counts;
tests/unit/engine/test_fake_cuda.py compares later changes with them.

    python scripts/bench kernel_table --write

`--bytes` prints the bytes that a step reads and writes in the device's memory, by group of
operations. `least` counts weights and entries read once, and inputs and outputs of products and
attention. A kernel that fuses more could save the rest.

    python scripts/bench kernel_table --bytes

`--json` prints a few of these figures as JSON: gigabytes of a dense step and of a cached row's
step, kernels per block of the latter, and kernels of a step of SDXL with guidance.

    python scripts/bench kernel_table --bytes --json
"""

from __future__ import annotations

import argparse
import json

from maskserve_benchmarks.reports import write_json
from maskserve_studies.kernels.kernel_counts import (
    CASES,
    GROUPS,
    NEEDED,
    SDXL_GUIDED,
    TABLE,
    UNET_CASES,
    Counts,
    count,
    entry_bytes,
    moved_bytes,
    unet_step,
)

_BYTES_OF = (
    "dense, 1 row",
    "kv int8, 1 row",
    "kv int8, 4 rows, mixed",
    "kv int8, 8 rows, mixed",
    "project int8, 1 row",
    "project int8, 4 rows, mixed",
    "dense, 1 row, fp8",
    "kv int8, 1 row, fp8",
    "kv int8, 4 rows, mixed, fp8",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}, too")
    parser.add_argument("--bytes", action="store_true", help="print bytes instead")
    parser.add_argument("--json", action="store_true", help="print the summary alone, with --bytes")
    args = parser.parse_args()
    if args.json and not args.bytes:
        parser.error("--json: with --bytes")
    if args.json:
        print(json.dumps({"summary": summary()}, indent=2))
        return 0
    if args.bytes:
        print_bytes()
        return 0
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
    print("\n| step | step | per block |\n|---|---|---|")
    unets: dict[str, dict[str, float]] = {}
    for unet_case in UNET_CASES:
        log, blocks = unet_step(unet_case)
        unets[unet_case.name] = {"step": log.launches, "per_block": round(log.launches / blocks, 1)}
        print(
            "| {} | {step} | {per_block} |".format(unet_case.name, **unets[unet_case.name]),
            flush=True,
        )
    if args.write:
        rows = {name: {"step": c.step, "per_block": c.per_block} for name, c in counts.items()}
        rows |= unets
        write_json(rows, TABLE)
    return 0


def summary() -> dict[str, float]:
    """The figures that later changes are compared with."""
    dense, cached = (
        next(case for case in CASES if case.name == name)
        for name in ("dense, 1 row", "kv int8, 1 row")
    )
    return {
        "dense_gb": round(moved_bytes(dense).total() / 1e9, 2),
        "kv_int8_gb": round(moved_bytes(cached).total() / 1e9, 2),
        "kernels_per_block_kv": count(cached).per_block,
        "sdxl_cfg_launches": unet_step(SDXL_GUIDED)[0].launches,
    }


def print_bytes() -> None:
    """Print the gigabytes of a step by group."""
    groups = (*GROUPS, "outside")
    print(f"| step | {' | '.join(groups)} | all | least | times least |")
    print("|---|" + "---|" * (len(groups) + 3))
    for case in CASES:
        if case.name not in _BYTES_OF:
            continue
        moved = moved_bytes(case)
        whole, least = moved.total(), sum(moved[group] for group in NEEDED) + entry_bytes(case)
        cells = [f"{moved[group] / 1e9:.2f}" for group in groups]
        cells += [f"{whole / 1e9:.2f}", f"{least / 1e9:.2f}", f"{whole / least:.2f}"]
        print(f"| {case.name} | {' | '.join(cells)} |", flush=True)
