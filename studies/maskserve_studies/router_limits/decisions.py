"""Measure the time of one routing decision, by policy, cluster size and state.

    python scripts/bench routing --json routing.json

Every decision gets new views, so that nothing is cached between decisions. The views are made
outside the timing, because a router makes one when a status record arrives; `from_status` is timed
separately, per record.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from pathlib import Path

from maskserve_benchmarks.machine import processor
from maskserve_common.routing import POLICIES, Edit, Pricing, WorkerView, make_policy
from maskserve_common.status import RowStatus, WorkerStatus

TOTAL = 4096
TEMPLATES = 970
PRICING = Pricing(0.004, 0.12, 0.012, 2.6e-5, 3e-6, {"disk": 2.0})
BARS_MS = {8: 0.1, 256: 1.0}


def random_status(rng: random.Random, worker: str, running: int, waiting: int) -> WorkerStatus:
    def row(i: int) -> RowStatus:
        active = rng.randint(20, 1200)
        template = f"{rng.randrange(TEMPLATES):064x}"
        return RowStatus(f"{worker}-{i}", "cached", active, TOTAL, rng.randint(1, 28), template)

    template_ids = rng.sample(range(TEMPLATES), 200)
    return WorkerStatus(
        worker,
        "flux",
        "ready",
        max_rows=8,
        max_waiting=256,
        running=tuple(row(i) for i in range(running)),
        waiting=tuple(row(running + i) for i in range(waiting)),
        templates={"host": tuple(f"{t:064x}" for t in template_ids)},
    )


def measure(policy: str, workers: int, running: int, waiting: int, decisions: int) -> list[float]:
    """Return the milliseconds of each decision."""
    rng = random.Random(0)
    policy_object = make_policy(policy)
    milliseconds = []
    for _ in range(decisions):
        views = [
            WorkerView.from_status(
                random_status(rng, f"w{i:03d}", running, waiting), PRICING, as_of=0.0
            )
            for i in range(workers)
        ]
        edit = Edit(28, rng.randint(20, 1200), TOTAL, f"{rng.randrange(TEMPLATES):064x}")
        start = time.perf_counter_ns()
        policy_object.choose(edit, views, 0.01)
        milliseconds.append((time.perf_counter_ns() - start) / 1e6)
    return milliseconds


def measure_views(records: int) -> list[float]:
    """Return the milliseconds to turn a status record into a view."""
    rng = random.Random(0)
    milliseconds = []
    for i in range(records):
        status = random_status(rng, f"w{i}", 8, 0)
        start = time.perf_counter_ns()
        WorkerView.from_status(status, PRICING, as_of=0.0)
        milliseconds.append((time.perf_counter_ns() - start) / 1e6)
    return milliseconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--decisions", type=int, default=300, help="per line (default: 300)")
    args = parser.parse_args()
    lines: list[dict[str, float | str]] = []
    met = True
    print(
        f"{'policy':15} {'workers':>7} {'rows':>5} {'waiting':>7} {'median ms':>10} {'p95 ms':>8}"
    )
    for policy in POLICIES:
        for workers, running, waiting in (
            (8, 7, 0),
            (8, 8, 0),
            (8, 8, 8),
            (256, 7, 0),
            (256, 8, 0),
            (256, 8, 8),
        ):
            decisions = args.decisions if workers == 8 else max(args.decisions // 10, 10)
            milliseconds = sorted(measure(policy, workers, running, waiting, decisions))
            median, p95 = (
                statistics.median(milliseconds),
                milliseconds[int(0.95 * len(milliseconds))],
            )
            lines.append(
                {
                    "policy": policy,
                    "workers": workers,
                    "running": running,
                    "waiting": waiting,
                    "median_ms": median,
                    "p95_ms": p95,
                }
            )
            if policy == "mask_aware" and not waiting:
                met = met and median <= BARS_MS[workers]
            print(
                f"{policy:15} {workers:7} {running:5} {waiting:7} {median:10.4f} {p95:8.4f}",
                flush=True,
            )
    view_ms = statistics.median(measure_views(args.decisions))
    print(f"a status record into a view: median {view_ms:.4f} ms")
    print(f"bars (mask_aware, 8 rows, nobody waiting): {'met' if met else 'MISSED'}")
    if args.json:
        report = {
            "machine": processor(),
            "python": platform.python_version(),
            "bars_ms": BARS_MS,
            "met": met,
            "view_from_status_ms": view_ms,
            "lines": lines,
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if met else 1
