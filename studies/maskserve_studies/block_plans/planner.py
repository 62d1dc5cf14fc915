"""Measure the time of planning: FLUX.1 at 1024x1024, 57 blocks, 8 rows.

    python scripts/bench planner --json build/bench_planner.json

It draws row sets with a fixed seed and plans each from its rows (sums, costs, plan). Then row sets
drift through a plan cache: one row leaves and one joins per step. It prints medians and tails of
CPU time, and the latency that a shared plan loses against the best plan.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

from maskserve_benchmarks.machine import processor
from maskserve_benchmarks.published_models import FLUX_DEV
from maskserve_benchmarks.step_counts import flop_limit
from maskserve_common.line_fit import Line
from maskserve_engine.families.flux.spec import flux_work
from maskserve_engine.planning.cost_model import H100, CostModel, estimate
from maskserve_engine.planning.entry_bytes import FORMATS, block_bytes
from maskserve_engine.planning.flops import RowTokens
from maskserve_engine.planning.planner import PlanCache, plan, plan_totals
from maskserve_engine.planning.two_stream import StepCosts, evaluate, step_costs

WORK = flux_work(FLUX_DEV, 128, 128)
TEXT, ROWS = 512, 8


def masks(rng: random.Random) -> float:
    """A mask ratio about the production mean of 0.11."""
    return min(0.9, max(0.01, rng.lognormvariate(-2.35, 0.5)))


def costs_of(rows: list[RowTokens], model: CostModel, fmt: str, budget: float) -> StepCosts:
    inactive = [(WORK.tokens[0] - r.active[0],) for r in rows]
    loads = block_bytes(WORK, inactive, FORMATS[fmt])
    return step_costs(WORK, WORK.totals(rows), model, {"host": loads}, budget_bytes=budget)


def timed(work: Any, *args: Any, **more: Any) -> tuple[float, Any]:
    """CPU milliseconds of the call, so that other work on the machine does not count, and its
    result.
    """
    start = time.thread_time()
    result = work(*args, **more)
    return 1e3 * (time.thread_time() - start), result


def summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 4),
        "p95": round(ordered[int(0.95 * len(ordered))], 4),
        "p99": round(ordered[int(0.99 * len(ordered))], 4),
        "max": round(ordered[-1], 4),
    }


def link(gbytes: float) -> CostModel:
    return CostModel(
        "H100", estimate(H100).compute, {"host": Line(3e-5, 1e-9 / gbytes)}, "estimate"
    )


def cold(rng: random.Random, count: int, lead: float | None) -> dict[str, Any]:
    """Plan unrelated row sets on all links and formats."""
    costs_ms, plan_ms, gaps = [], [], []
    for _ in range(count):
        rows = [WORK.row_at(masks(rng), TEXT) for _ in range(ROWS)]
        model, fmt = link(rng.choice((7, 14, 25, 50))), rng.choice(("bfloat16", "int8"))
        elapsed_ms, costs = timed(costs_of, rows, model, fmt, rng.choice((1e9, 2e9, 4e9)))
        costs_ms.append(elapsed_ms)
        elapsed_ms, solution = timed(plan, costs, lead=lead, intervals=2)
        plan_ms.append(elapsed_ms)
        gaps.append(solution.latency / solution.bound - 1)
    total_ms = [a + b for a, b in zip(costs_ms, plan_ms, strict=True)]
    return {
        "costs_ms": summary(costs_ms),
        "plan_ms": summary(plan_ms),
        "both_ms": summary(total_ms),
        "proved_within": summary(gaps),
    }


def drifting(rng: random.Random, steps: int, gbytes: float, fmt: str) -> dict[str, Any]:
    """Let one row leave and one join per step; plans come through the cache."""
    model, cache = link(gbytes), PlanCache()
    rows = [WORK.row_at(masks(rng), TEXT) for _ in range(ROWS)]
    hit_ms: list[float] = []
    miss_ms: list[float] = []
    regrets: list[float] = []

    def step() -> Any:
        totals = WORK.totals(rows)
        inactive = ROWS * WORK.tokens[0] - totals.active[0]
        return cache.get(
            "flux",
            plan_totals(totals, {"host": inactive}),
            lambda: costs_of(rows, model, fmt, 2e9),
        )

    for i in range(steps):
        rows = [*rows[1:], WORK.row_at(masks(rng), TEXT)]
        hits_before = cache.hits
        elapsed_ms, cached_plan = timed(step)
        (hit_ms if cache.hits > hits_before else miss_ms).append(elapsed_ms)
        if i % 20 == 0:
            costs = costs_of(rows, model, fmt, 2e9)
            regrets.append(evaluate(costs, cached_plan.kinds).latency / plan(costs).latency - 1)
    return {
        "hit_ms": summary(hit_ms),
        "miss_ms": summary(miss_ms),
        "hit_share": round(cache.hits / steps, 4),
        "regret": summary(regrets),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--count", type=int, default=200, help="row sets planned from scratch")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    cold(random.Random(0), 5, None)  # imports and caches warm
    report = {
        "machine": {
            "processor": processor(),
            "python": platform.python_version(),
        },
        "rows": ROWS,
        "blocks": len(WORK.blocks),
        "seed": args.seed,
        "flop_limit": {str(m): round(flop_limit(WORK, m, TEXT), 3) for m in (0.05, 0.11, 0.2)},
        "steady": cold(random.Random(args.seed), args.count, None),
        "one_step": cold(random.Random(args.seed), args.count // 4, 0.0),
        "cache": {
            f"{gbytes} GB/s {fmt}": drifting(random.Random(args.seed), 2000, gbytes, fmt)
            for gbytes, fmt in ((25, "bfloat16"), (50, "int8"))
        },
    }
    text = json.dumps(report, indent=2)
    print(text)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(text + "\n", encoding="utf-8")
    return 0
