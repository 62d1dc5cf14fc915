#!/usr/bin/env python3
"""The first thing to run on a machine with a GPU: under 10 minutes, one JSON to commit.

It checks that steps agree with diffusers (tests/gpu), times dense, `kv` and `project` steps of
FLUX.1-dev's true size against the counted limits, and reads off the device's memory and its link.

    python scripts/gpu/first_run.py --json docs/benchmarks/gpu-first-run.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
BENCH = ["--blocks", "19+38", "--batch", "1", "4", "8", "--repeat", "3", "--format", "int8"]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def link_gb_per_s(device: torch.device) -> float:
    """Of copies from pinned memory to the device."""
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    begin, end = _event(), _event()
    there.copy_(host, non_blocking=True)
    begin.record()
    for _ in range(8):
        there.copy_(host, non_blocking=True)
    end.record()
    end.synchronize()
    return 8 * host.numel() / 1e6 / float(begin.elapsed_time(end))


def steps(json_file: Path) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "scripts" / "bench_step.py"), *BENCH]
    subprocess.run([*command, "--json", str(json_file)], check=True, timeout=420)
    report: dict[str, Any] = json.loads(json_file.read_text(encoding="utf-8"))
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no CUDA device that torch can use", file=sys.stderr)
        return 1
    device = torch.device("cuda", 0)
    tests = [sys.executable, "-m", "pytest", "-q", str(ROOT / "tests" / "gpu")]
    parity = subprocess.run(tests, cwd=ROOT, timeout=300).returncode == 0
    free, total = torch.cuda.mem_get_info(device)
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "tests_passed": parity,
        "memory_gib": {"total": total / 2**30, "free": free / 2**30},
        "link_gb_per_s": round(link_gb_per_s(device), 2),
        "steps": steps(args.json.with_suffix(".steps.json"))["rows"],
    }
    args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if parity else 1


if __name__ == "__main__":
    sys.exit(main())
