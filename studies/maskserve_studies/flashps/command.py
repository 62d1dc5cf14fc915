"""Repeat FlashPS's comparisons on real workers: static and continuous batching, and ways of
routing.

    python scripts/bench flashps --json docs/benchmarks/flashps.json

A worker with `[engine] batching = "static"` is compared with one with continuous batching, at
shares of the latter's rate (Fig. 4 middle, Fig. 16 left). Then two workers run behind a router with
each policy (Fig. 4 right, Fig. 16 right). perf_analyzer makes the load: Poisson, over gRPC, in turn
and in rounds. No worker can be configured for the strawman, image work inside the step loop;
`simulate_cluster --bars` has it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_benchmarks.edits.edit import large_model
from maskserve_benchmarks.perf.command import CACHE
from maskserve_benchmarks.perf.server import Server
from maskserve_benchmarks.perf.tool import find_tool
from maskserve_benchmarks.reports import about, table, write_json
from maskserve_benchmarks.rivals import one_model
from maskserve_benchmarks.rivals.measurement import Bench, Figures, Plan
from maskserve_benchmarks.timing import hardware

PLANS: Final = {
    "demo": Plan(128, 48, 4, 1, (0.5, 0.8), 96, 240.0, study_rounds=3),
    "bench": Plan(256, 16, 2, 1, (0.5, 0.8), 32, 600.0, study_rounds=2),
}
PARTS: Final = ("batching", "routing")


def batching_lines(figures: Figures) -> str:
    """A table of the results of `one_model.by_batching`."""
    lines = [
        [
            share,
            run["sent_per_s"],
            *(run[way][key] for key in ("p95_ms", "waited_ms") for way in ("continuous", "static")),
            f"{run['static']['p95_ms'] / run['continuous']['p95_ms'] - 1:+.0%}",
        ]
        for share, run in figures.items()
    ]
    return table(
        ["load", "edits/s", "P95 continuous", "static", "waits continuous", "static", "P95 over"],
        lines,
    )


def routing_lines(figures: Figures) -> str:
    """A table of the results of `one_model.by_policy`."""
    mask_aware_ms = figures["p95_ms"]["mask_aware"]
    return table(
        ["policy", "P95 ms", "mask_aware under it"],
        [[name, p95, f"{1 - mask_aware_ms / p95:.1%}"] for name, p95 in figures["p95_ms"].items()],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", choices=tuple(PLANS), default="demo")
    parser.add_argument("--only", choices=PARTS, help="measure this alone")
    parser.add_argument("--rounds", type=int, help="turns of each (default 3, of `bench` 2)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    plan = PLANS[args.model]
    plan = replace(plan, study_rounds=args.rounds or plan.study_rounds)
    tool, begin = find_tool(None, CACHE), time.monotonic()
    report: dict[str, Any] = {**about(hardware(torch.device("cpu"))), "model": args.model}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = DEMO_MODEL if args.model == "demo" else large_model(folder / "model")
        bench = Bench(tool, Server("", ""), None, plan, folder)
        if args.only != "routing":
            report["batching"] = one_model.by_batching(bench, model, folder, {})
            print(batching_lines(report["batching"]), flush=True)
        if args.only != "batching":
            report["routing"] = one_model.by_policy(bench, model, folder)
            print(routing_lines(report["routing"]), flush=True)
    report["minutes"] = round((time.monotonic() - begin) / 60, 1)
    write_json(report, args.json)
    return 0
