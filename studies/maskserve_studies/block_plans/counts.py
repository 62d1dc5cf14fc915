"""Compare simpler planners with the exact planner on the same steps. The simpler planners spread
each kind of block evenly by its count, or use one kind for all blocks (docs/decisions/plan.md).

Random batches of FLUX.1 and SDXL at 1024x1024 on an H100 by its data sheet: 1 to 8 rows, mask
ratios .05 to .5, entries in bfloat16 or int8, over 50, 25 or 7 GB/s, 2 GB of prefetch. An even
spread ignores the lead and the entries that have arrived.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from maskserve_benchmarks.published_models import FLUX_DEV_SPEC, SDXL_SPEC
from maskserve_common.line_fit import Line
from maskserve_engine.families.specs import counted_work
from maskserve_engine.planning.cost_model import CostModel
from maskserve_engine.planning.entry_bytes import FORMATS, block_bytes
from maskserve_engine.planning.flops import KINDS
from maskserve_engine.planning.plan_bounds import best_counts, sorts_of
from maskserve_engine.planning.planner import TOLERANCE, plan
from maskserve_engine.planning.two_stream import StepCosts, items_of, plan_of, step_costs

_BATCHES = 120
_MODELS = {"FLUX.1": (FLUX_DEV_SPEC, 512), "SDXL": (SDXL_SPEC, 77)}
_FLOPS, _LINKS, _FORMATS = 989e12 / 2, (50e9, 25e9, 7e9), ("bfloat16", "int8")


def by_counts(costs: StepCosts, lead: float | None) -> float:
    """Seconds of the best plan that needs no search."""
    items = items_of(costs)
    fixed = float(costs.before.sum()) + costs.after
    counts = best_counts(items, sorts_of(items), fixed, TOLERANCE)
    tried = [[kind] * len(costs.compute) for kind in range(len(KINDS))]
    tried += [] if counts is None else list(counts.plans)
    return min(plan_of(costs, items, kinds, lead, 0.0).latency for kinds in tried)


def steps(spec: Any, text: int, *, arrived: bool, rng: np.random.Generator) -> StepCosts:
    work = counted_work(spec, 128, 128)
    rows = [work.row_at(float(m), text) for m in rng.uniform(0.05, 0.5, rng.integers(1, 9))]
    spare = [tuple(a - b for a, b in zip(work.tokens, r.active, strict=True)) for r in rows]
    loads = block_bytes(work, spare, FORMATS[str(rng.choice(_FORMATS))])
    if arrived:
        loads[: int(rng.integers(1, len(loads) // 2))] = 0.0
    link = Line(0.0, 1 / float(rng.choice(_LINKS)))
    model = CostModel("H100", Line(0.0, 1 / _FLOPS), {"host": link}, "estimate")
    return step_costs(work, work.totals(rows), model, {"host": loads}, budget_bytes=2e9)


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0]).parse_args()
    rng = np.random.default_rng(0)
    print("| model | step | median | p95 | worst | exact, ms | counts, ms |")
    print("|---|---|---|---|---|---|---|")
    for name, (spec, text) in _MODELS.items():
        for steady in (True, False):
            for arrived in (False, True):
                loss, cpu_s = [], np.zeros(2)
                for _ in range(_BATCHES):
                    costs = steps(spec, text, arrived=arrived, rng=rng)
                    lead = None if steady else float(rng.uniform(0.0, 5e-3))
                    marks = [time.process_time()]
                    best = plan(costs, lead=lead, intervals=2).latency
                    marks.append(time.process_time())
                    simple = by_counts(costs, lead)
                    marks.append(time.process_time())
                    loss.append(100 * (simple / best - 1))
                    cpu_s += np.diff(marks)
                kind = "repeated" if steady else "from a lead"
                kind += ", part arrived" if arrived else ""
                figures = [f"{q:.2f} %" for q in np.percentile(loss, (50, 95, 100))]
                figures += [f"{1e3 * s / _BATCHES:.2f}" for s in cpu_s]
                print(f"| {name} | {kind} | {' | '.join(figures)} |", flush=True)


if __name__ == "__main__":
    main()
