"""The comparisons that must hold, run with stated seeds.

Every comparison serves the same edits at the same times under each policy (common random numbers),
so the noise of a margin is that of its differences from seed to seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from maskserve_benchmarks.simulator.capacity import at_load
from maskserve_benchmarks.simulator.hardware import Hardware
from maskserve_benchmarks.simulator.loras import LoraTiers
from maskserve_benchmarks.simulator.result import Result, simulate
from maskserve_benchmarks.simulator.scenario import BATCHING, Scenario, Tiers
from maskserve_benchmarks.simulator.workload import Workload

EDITS = 2000
MAIN_SEEDS = (1, 2, 3, 4, 5)
SEEDS = (1, 2, 3)
ROUND_ROBIN_BAR = 0.40
POLICY_NAMES = ("round_robin", "least_requests", "least_tokens", "mask_aware")
CONTROLS_LOAD = 0.9
LORAS_LOAD = 0.6
PAPER = {"static": 0.35, "strawman": 0.40}
"""P95 over continuous batching, FlashPS §6.4."""
SMALL_BATCHES_IDLE = 1 / 3
"""`Hardware.overhead` at which a FLUX row of mask ratio 0.2 is 1.9 x as fast as a dense one, as
FlashPS Fig. 15 has it; counted FLOPs alone say 3.5 x."""
FEW_TOKENS_IDLE = 1 / 2
"""Where static batching comes out as FlashPS §6.4 measured it: fitted to that figure."""
H200_IDLE = 0.06
"""Of FLUX's recorded steps on an H200 (docs/gpu.md): a line through a dense step and one of a mask
ratio of 0.05 or 0.11 meets 0 FLOPs at 4 to 6 % of the first, between an edit's own anchors at 8."""

Report = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Case:
    """A scenario in which policies are compared."""

    name: str
    scenario: Scenario
    hardware: Hardware
    load: float
    seeds: tuple[int, ...] = SEEDS
    bar: bool = False
    """Whether mask_aware must be `ROUND_ROBIN_BAR` under round_robin here."""


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
    """P95 of each policy, and by how much mask_aware is under each other."""
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
        "p95": {p: _mean(r.p95 for r in rs) for p, rs in runs.items()},
        "mean": {p: _mean(r.mean for r in rs) for p, rs in runs.items()},
        "p50": {p: _mean(r.p50 for r in rs) for p, rs in runs.items()},
        "p99": {p: _mean(r.p99 for r in rs) for p, rs in runs.items()},
        "goodput": {p: _mean(r.goodput for r in rs) for p, rs in runs.items()},
        "good_share": {p: _mean(r.good_share for r in rs) for p, rs in runs.items()},
        "utilisation": {p: _mean(r.utilisation for r in rs) for p, rs in runs.items()},
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
    """Static batching and the strawman against continuous batching, on one worker.

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
            p95 = {mode: _mean(r.p95 for r in rs) for mode, rs in runs.items()}
            reports.append(
                {
                    "text": text,
                    "overhead": hardware.costs.compute.fixed / 0.21,
                    "rate": rate,
                    "seeds": SEEDS,
                    "p95": p95,
                    "over": {m: p95[m] / p95["continuous"] - 1.0 for m in PAPER},
                    "batch": {mode: _mean(r.batch for r in rs) for mode, rs in runs.items()},
                    "utilisation": {m: _mean(r.utilisation for r in rs) for m, rs in runs.items()},
                    "interruptions_p50": _mean(r.interruptions_p50 for r in runs["strawman"]),
                    "interruptions_p95": _mean(r.interruptions_p95 for r in runs["strawman"]),
                }
            )
    return reports


def residency() -> list[Report]:
    """What it saves that mask_aware knows where templates are: 8 hosts of one worker, 970
    templates, 100 in each memory, the rest on each host's disk or nowhere.
    """
    reports = []
    hardware = Hardware()
    for name, disk in (("the rest on disk", 970), ("the rest nowhere", 0)):
        tiers = Tiers(workers_per_host=1, host_templates=100, disk_templates=disk)
        for policy, knows_templates in (
            ("least_requests", False),
            ("mask_aware", False),
            ("mask_aware", True),
        ):
            scenario = at_load(
                Scenario(
                    Workload(EDITS, 1.0, "production"),
                    policy,
                    tiers=replace(tiers, known=knows_templates),
                ),
                hardware,
                0.6 if disk else 0.4,
            )
            runs = [simulate(scenario, hardware, seed) for seed in SEEDS]
            reports.append(
                {
                    "case": name,
                    "load": 0.6 if disk else 0.4,
                    "policy": policy
                    if knows_templates or policy != "mask_aware"
                    else "mask_aware, blind",
                    "seeds": SEEDS,
                    "p95": _mean(r.p95 for r in runs),
                    "mean": _mean(r.mean for r in runs),
                    "fetches": _mean(r.fetches for r in runs),
                    "misses": _mean(r.misses for r in runs),
                    "primed": _mean(r.primed for r in runs),
                    "utilisation": _mean(r.utilisation for r in runs),
                }
            )
    return reports


def controls() -> list[Report]:
    """What it saves that mask_aware knows what ControlNets cost: half of the edits have one."""
    hardware, reports = Hardware(), []
    workload = Workload(EDITS, 1.0, "production", controlled=0.5)
    for policy, priced in (
        ("least_requests", False),
        ("mask_aware", False),
        ("mask_aware", True),
    ):
        scenario = at_load(
            Scenario(workload, policy, controls_priced=priced), hardware, CONTROLS_LOAD
        )
        runs = [simulate(scenario, hardware, seed) for seed in SEEDS]
        reports.append(
            {
                "policy": policy if priced or policy != "mask_aware" else "mask_aware, not priced",
                "load": CONTROLS_LOAD,
                "seeds": SEEDS,
                "p95": _mean(r.p95 for r in runs),
                "mean": _mean(r.mean for r in runs),
            }
        )
    return reports


def loras() -> list[Report]:
    """What it saves that mask_aware knows where LoRAs are: 95 % of the edits have one (Katz
    section 1), each device holds 16 of 94.
    """
    hardware, reports = Hardware(), []
    workload = Workload(EDITS, 1.0, "production", with_lora=0.95)
    for policy, knows_loras in (
        ("least_requests", False),
        ("mask_aware", False),
        ("mask_aware", True),
    ):
        tiers = LoraTiers(known=knows_loras)
        scenario = at_load(Scenario(workload, policy, loras=tiers), hardware, LORAS_LOAD)
        runs = [simulate(scenario, hardware, seed) for seed in SEEDS]
        reports.append(
            {
                "policy": policy if knows_loras or policy != "mask_aware" else "mask_aware, blind",
                "load": LORAS_LOAD,
                "seeds": SEEDS,
                "p95": _mean(r.p95 for r in runs),
                "mean": _mean(r.mean for r in runs),
                "loads": _mean(r.lora_loads for r in runs),
                "refused": _mean(r.refused for r in runs),
            }
        )
    return reports


def run_bars(say: Say) -> Report:
    """Everything; `met` says whether every bar is."""
    say("P95 in seconds; margin of mask_aware under the other, with its standard error")
    routed = []
    for case in routing_cases():
        report = routing(case)
        routed.append(report)
        say(_routing_line(report))
    say("\nP95 over continuous batching (paper: static +35 %, strawman +40 %)")
    batched = batching()
    for report in batched:
        over = report["over"]
        say(
            f"  overhead {report['overhead']:4.0%}, {report['rate']:.1f}/s: "
            f"static {over['static']:+5.0%}, strawman {over['strawman']:+5.0%}, "
            f"interruptions {report['interruptions_p50']:.0f} (p95 "
            f"{report['interruptions_p95']:.0f})"
        )
    say("\nTemplates in 100-template memories")
    resident = residency()
    for report in resident:
        say(
            f"  {report['case']:17} {report['policy']:18} P95 {report['p95']:6.2f}  "
            f"fetches {report['fetches']:6.0f}  misses {report['misses']:6.0f}"
        )
    say("\nHalf of the edits with a ControlNet")
    controlled = controls()
    for report in controlled:
        say(f"  {report['policy']:22} P95 {report['p95']:6.2f}  mean {report['mean']:6.2f}")
    say("\n95 % of the edits with one of 94 LoRAs, 16 on each device")
    with_loras = loras()
    for report in with_loras:
        say(
            f"  {report['policy']:22} P95 {report['p95']:6.2f}  mean {report['mean']:6.2f}  "
            f"loads {report['loads']:6.0f}  refused {report['refused']:4.0f}"
        )
    met = all(report["met"] for report in routed)
    say(f"\nbars: {'met' if met else 'MISSED'}")
    return {
        "met": met,
        "routing": routed,
        "batching": batched,
        "residency": resident,
        "controls": controlled,
        "loras": with_loras,
    }


def _routing_line(report: Report) -> str:
    p95 = "  ".join(f"{name} {value:6.2f}" for name, value in report["p95"].items())
    under = "  ".join(
        f"{name} {u['margin']:+6.1%} ± {u['standard_error']:.1%}"
        for name, u in report["under"].items()
    )
    flag = "" if report["met"] else "  MISSED"
    return f"  {report['case']:27} {report['load']:4.0%}: {p95}\n{'':34} {under}{flag}"


def _mean(values: Any) -> float:
    return float(np.mean(list(values)))


def _standard_error(values: list[float]) -> float:
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan
