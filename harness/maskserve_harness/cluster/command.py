"""What a router adds to an edit, and how its policies balance workers in real time."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

from maskserve_harness.benchmarks.machine import machine
from maskserve_harness.cluster import added, balance

UNDER_ROUND_ROBIN = 0.40
AGREES_WITHIN = 0.10


def main() -> int:
    """Measure, tell, and hold the figures to the bars."""
    options = _parser().parse_args()
    if options.show:
        print(tables(json.loads(options.show.read_text())))
        return 0
    plan = balance.Plan(
        options.edits,
        tuple(options.loads),
        tuple(options.policies),
        options.mix,
        options.speed,
        options.seed,
    )
    report: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "hardware": machine(),
        "date": date.today().isoformat(),
    }
    if not options.only or options.only == "added":
        report |= added.measure()
    if not options.only or options.only == "balance":
        report["policies"] = balance.measure(plan)
        report["plan"] = {
            "workers": balance.WORKERS,
            "edits": plan.edits,
            "mix": plan.mix,
            "speed": plan.speed,
            "seed": plan.seed,
        }
    missed = bars(report)
    report["missed"] = missed
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    _show(report)
    return 1 if missed else 0


def bars(report: dict[str, Any]) -> list[str]:
    """Sentences, one for each bar that the figures miss."""
    missed = []
    for size, figures in report.get("added_ms", {}).items():
        if figures["p50"] > added.BARS_MS[size]:
            missed.append(f"{size}: {figures['p50']:.1f} ms are added, above {added.BARS_MS[size]}")
    rate = report.get("requests_per_s", {}).get("router")
    if rate is not None and rate < added.REQUESTS_PER_S:
        missed.append(f"{rate:.0f} requests a second, below {added.REQUESTS_PER_S:.0f}")
    policies = report.get("policies", {})
    for name, loads in policies.items():
        for load, figures in loads.items():
            if figures["lost"]:
                missed.append(f"{name} at {load}: {figures['lost']} edits were not answered")
            if abs(figures["off"]["p95"]) > AGREES_WITHIN:
                missed.append(
                    f"{name} at {load}: P95 is {figures['off']['p95']:+.0%} off the simulator's"
                )
    both = {"mask_aware", "round_robin"} <= set(policies)
    for load, figures in policies["mask_aware"].items() if both else ():
        rival = policies["round_robin"][load]["p95"]
        if 1.0 - figures["p95"] / rival < UNDER_ROUND_ROBIN:
            missed.append(f"mask_aware at {load}: P95 is less than 40 % under round_robin's")
    return missed


def tables(report: dict[str, Any]) -> str:
    """The figures as docs/benchmarks.md has them."""
    lines = [
        "| request and answer | direct | proxy | router | added by the router | bar |",
        "|---|---|---|---|---|---|",
    ]
    for size, f in report["added_ms"].items():
        lines.append(
            f"| {size} (p50) | {f['direct_p50']:.2f} ms | {f['proxy_p50']:.2f} ms "
            f"| {f['router_p50']:.2f} ms | **{f['p50']:.2f} ms** | {added.BARS_MS[size]:g} ms |"
        )
    rates = report["requests_per_s"]
    lines += [
        f"| 1 KB, 16 at a time | {rates['direct']:.0f}/s | {rates['proxy']:.0f}/s "
        f"| **{rates['router']:.0f}/s** | | {added.REQUESTS_PER_S:g}/s |",
        "",
        "| policy | load | mean | P50 | P95 | simulated P95 | off | P99 | predicted within |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, loads in report["policies"].items():
        for load, f in loads.items():
            error = f["prediction_error"]
            lines.append(
                f"| {name} | {float(load):.0%} | {f['mean']:.2f} | {f['p50']:.2f} "
                f"| {f['p95']:.2f} | {f['simulated']['p95']:.2f} | {f['off']['p95']:+.1%} "
                f"| {f['p99']:.2f} | {error['median']:.0%}, P95 {error['p95']:.0%} |"
            )
    return "\n".join(lines)


def _show(report: dict[str, Any]) -> None:
    for size, figures in report.get("added_ms", {}).items():
        print(
            f"{size:7} direct {figures['direct_p50']:.2f} ms, through the router "
            f"{figures['router_p50']:.2f} ms: {figures['p50']:+.2f} ms, "
            f"{figures['of_it_grpc']:+.2f} through a proxy that does nothing"
        )
    for way, rate in report.get("requests_per_s", {}).items():
        print(f"{way:7} {rate:.0f} requests of 1 KB per second")
    for name, loads in report.get("policies", {}).items():
        for load, f in loads.items():
            print(
                f"{name:15} load {load:5} mean {f['mean']:6.2f}  P50 {f['p50']:6.2f}  "
                f"P95 {f['p95']:6.2f} (simulated {f['simulated']['p95']:6.2f}, "
                f"{f['off']['p95']:+.1%})  P99 {f['p99']:6.2f} s, predicted within "
                f"{f['prediction_error']['median']:.0%} (median), "
                f"{f['prediction_error']['p95']:.0%} (P95)"
            )
    for sentence in report["missed"]:
        print(f"MISSED: {sentence}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="What a router adds to an edit, how many it passes on, and how its policies "
        "balance eight emulated workers in real time, beside the simulator."
    )
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write all figures here")
    add("--show", type=Path, metavar="FILE", help="print the tables of a figures file; no run")
    add("--only", choices=("added", "balance"), help="one of the two parts")
    add("--edits", type=int, default=600, help="of each run (default 600)")
    add("--loads", type=float, nargs="+", default=[0.8, 0.95], help="shares of the capacity")
    add("--policies", nargs="+", choices=balance.POLICIES, default=balance.POLICIES)
    add("--mix", default="public", help="distribution of mask ratios (default public)")
    add("--speed", type=float, default=4.0, help="how much faster than the device (default 4)")
    add("--seed", type=int, default=1)
    return parser
