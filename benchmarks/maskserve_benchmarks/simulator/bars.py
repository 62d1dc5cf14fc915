"""Comparisons of routing policies and kinds of batching, run with stated seeds.

Every comparison serves the same edits at the same times under each policy (common random numbers),
so the noise of a margin is that of its differences from seed to seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from maskserve_benchmarks.simulator.capacity import at_load
from maskserve_benchmarks.simulator.hardware import Hardware
from maskserve_benchmarks.simulator.result import Result, simulate
from maskserve_benchmarks.simulator.scenario import BATCHING, Scenario
from maskserve_benchmarks.simulator.workload import Workload

EDITS = 2000
MAIN_SEEDS = (1, 2, 3, 4, 5)
SEEDS = (1, 2, 3)
ROUND_ROBIN_BAR = 0.40
POLICY_NAMES = ("round_robin", "least_requests", "least_tokens", "mask_aware")
PAPER = {"static": 0.35, "strawman": 0.40}
"""P95 of other kinds of batching above that of continuous batching, as a share (FlashPS §6.4)."""
SMALL_BATCHES_IDLE = 1 / 3
"""`Hardware.overhead` at which a FLUX row of mask ratio 0.2 is 1.9 x as fast as a dense one, as in
FlashPS Fig. 15; counted FLOPs alone give 3.5 x."""
FEW_TOKENS_IDLE = 1 / 2
"""`Hardware.overhead` at which static batching reaches the figure of FlashPS §6.4; fitted to that
figure."""
H200_IDLE = 0.06
"""`Hardware.overhead` of FLUX's recorded steps on an H200 (docs/gpu.md). A line through a dense
step and a step of mask ratio 0.05 or 0.11 meets 0 FLOPs at 4 to 6 % of the dense step. For steps
between refresh steps the line meets it at 8 %."""

Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A scenario for the comparison of policies."""

    name: str
    scenario: Scenario
    hardware: Hardware
    load: float
    seeds: tuple[int, ...] = SEEDS
    bar: bool = False
    """Whether P95 of mask_aware must be lower than that of round_robin by `ROUND_ROBIN_BAR`
    here."""


def routing_cases() -> list[Case]:
    plain, overhead = Hardware(), Hardware(overhead=SMALL_BATCHES_IDLE)
    whole = Hardware(entry_format="bfloat16", stride=1)
    public, production = Workload(EDITS, 1.0), Workload(EDITS, 1.0, "production")
    mixed = (8, 20, 28, 50)

    def case(name: str, w: Workload, load: float, h: Hardware = plain, **more: Any) -> Case:
        return Case(name, Scenario(w, **more), h, load)

    return [
        replace(case("public", public, 0.8), seeds=MAIN_SEEDS, bar=True),
        replace(case("public", public, 0.95), seeds=MAIN_SEEDS, bar=True),
        case("public", public, 0.5),
        case("production", production, 0.8),
        case("production", production, 0.95),
        case("public, 8 to 50 steps", replace(public, steps=mixed), 0.8),
        case("public, 8 to 50 steps", replace(public, steps=mixed), 0.95),
        case("production, 8 to 50 steps", replace(production, steps=mixed), 0.95),
        case("public, bursts (cv 2.5)", replace(public, burst=2.5), 0.8),
        case("public, idle small batches", public, 0.8, overhead),
        case("public, idle small batches", public, 0.95, overhead),
        case("production, load-bound", production, 0.8, whole),
        case("production, load-bound", production, 0.95, whole),
        case("public, noisy steps", public, 0.8, noise=0.2),
        case("public, 32 workers", replace(public, requests=4000), 0.9, workers=32),
    ]


def routing(case: Case, policies: tuple[str, ...] = POLICY_NAMES) -> Report:
    """Return P95 of each policy, and by how much mask_aware is below each other policy."""
    scenario = at_load(case.scenario, case.hardware, case.load)
    runs: dict[str, list[Result]] = {
        policy: [simulate(replace(scenario, policy=policy), case.hardware, s) for s in case.seeds]
        for policy in policies
    }
    report: Report = {
        "case": case.name,
        "load": case.load,
        "bar": case.bar,
        "workers": scenario.workers,
        "edits": scenario.workload.requests,
        "rate": scenario.workload.rate,
        "seeds": case.seeds,
        "p95": {p: mean(r.p95 for r in rs) for p, rs in runs.items()},
        "mean": {p: mean(r.mean for r in rs) for p, rs in runs.items()},
        "p50": {p: mean(r.p50 for r in rs) for p, rs in runs.items()},
        "p99": {p: mean(r.p99 for r in rs) for p, rs in runs.items()},
        "goodput": {p: mean(r.goodput for r in rs) for p, rs in runs.items()},
        "good_share": {p: mean(r.good_share for r in rs) for p, rs in runs.items()},
        "utilisation": {p: mean(r.utilisation for r in rs) for p, rs in runs.items()},
        "under": {},
    }
    met = True
    for policy in policies:
        if policy == "mask_aware":
            continue
        pairs = zip(runs["mask_aware"], runs[policy], strict=True)
        margins = [
            1.0 - mask_aware_run.p95 / policy_run.p95 for mask_aware_run, policy_run in pairs
        ]
        margin, error = float(np.mean(margins)), _standard_error(margins)
        report["under"][policy] = {"margin": margin, "standard_error": error}
        met = met and margin >= -2.0 * error
        if policy == "round_robin" and case.bar:
            met = met and margin >= ROUND_ROBIN_BAR
    return report | {"met": met}


def batching(
    rates: Sequence[float] = (0.2, 0.3, 0.4, 0.5),
    overheads: Sequence[float | None] = (None, H200_IDLE, SMALL_BATCHES_IDLE, FEW_TOKENS_IDLE),
    text: Literal["frozen", "computed"] = "computed",
) -> list[Report]:
    """Compare static batching and the strawman with continuous batching, on one worker.

    Args:
        rates: edits per second.
        overheads: see `Hardware.overhead`.
        text: see `Hardware.own_text`; FlashPS computes it.
    """
    reports = []
    for overhead in overheads:
        hardware = Hardware(
            entry_format="bfloat16",
            stride=1,
            overhead=overhead,
            dense_seconds=0.21,
            own_text=text,
        )
        for rate in rates:
            runs = {
                mode: [
                    simulate(
                        Scenario(
                            Workload(EDITS // 2, rate, "production", ring=0),
                            workers=1,
                            batching=mode,
                            pre_seconds=0.18,
                            post_seconds=0.18,
                        ),
                        hardware,
                        seed,
                    )
                    for seed in SEEDS
                ]
                for mode in BATCHING
            }
            p95 = {mode: mean(r.p95 for r in rs) for mode, rs in runs.items()}
            reports.append(
                {
                    "text": text,
                    "overhead": hardware.costs.compute.fixed / 0.21,
                    "rate": rate,
                    "seeds": SEEDS,
                    "p95": p95,
                    "over": {m: p95[m] / p95["continuous"] - 1.0 for m in PAPER},
                    "batch": {mode: mean(r.batch for r in rs) for mode, rs in runs.items()},
                    "utilisation": {m: mean(r.utilisation for r in rs) for m, rs in runs.items()},
                    "interruptions_p50": mean(r.interruptions_p50 for r in runs["strawman"]),
                    "interruptions_p95": mean(r.interruptions_p95 for r in runs["strawman"]),
                }
            )
    return reports


def mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _standard_error(values: list[float]) -> float:
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan
