"""The comparisons of the simulated cluster: routing, batching, and the gain of a policy that knows
templates, ControlNets and LoRAs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from maskserve_benchmarks.simulator.bars import (
    EDITS,
    SEEDS,
    Report,
    batching,
    mean,
    routing,
    routing_cases,
)
from maskserve_benchmarks.simulator.capacity import at_load
from maskserve_benchmarks.simulator.hardware import Hardware
from maskserve_benchmarks.simulator.loras import LoraTiers
from maskserve_benchmarks.simulator.result import simulate
from maskserve_benchmarks.simulator.scenario import Scenario, Tiers
from maskserve_benchmarks.simulator.workload import Workload

CONTROLS_LOAD = 0.9
LORAS_LOAD = 0.6

Say = Callable[[str], None]


def residency() -> list[Report]:
    """The gain when mask_aware knows where templates are. 8 hosts with one worker each serve 970
    templates. Each memory holds 100; the rest is on the host's disk or nowhere.
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
                    "p95": mean(r.p95 for r in runs),
                    "mean": mean(r.mean for r in runs),
                    "fetches": mean(r.fetches for r in runs),
                    "misses": mean(r.misses for r in runs),
                    "primed": mean(r.primed for r in runs),
                    "utilisation": mean(r.utilisation for r in runs),
                }
            )
    return reports


def controls() -> list[Report]:
    """The gain when mask_aware knows the cost of ControlNets. Half of the edits have one."""
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
                "p95": mean(r.p95 for r in runs),
                "mean": mean(r.mean for r in runs),
            }
        )
    return reports


def loras() -> list[Report]:
    """The gain when mask_aware knows where LoRAs are. 95 % of the edits have one (Katz section 1).
    Each device holds 16 of 94.
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
                "p95": mean(r.p95 for r in runs),
                "mean": mean(r.mean for r in runs),
                "loads": mean(r.lora_loads for r in runs),
                "refused": mean(r.refused for r in runs),
            }
        )
    return reports


def run_bars(say: Say) -> Report:
    """Run everything. `met` says whether every bar is met."""
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
