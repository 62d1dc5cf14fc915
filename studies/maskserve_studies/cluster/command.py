"""Simulate a cluster that serves masked edits, in virtual time.

    python scripts/bench simulate_cluster --workers 8 --load 0.8 --mix public --json run.json
    python scripts/bench simulate_cluster --bars --json bars.json
    python scripts/bench simulate_cluster --deadlines --json deadlines.json --plots docs/images
    python scripts/bench simulate_cluster --tetriserve --json tetriserve.json
    python scripts/bench simulate_cluster --workflows --json workflows.json
    python scripts/bench simulate_cluster --workflow-inputs --json inputs.json

The production scheduler, planner, cost model and routing policies decide. Only time, the network
and the device's numbers are simulated. Equal arguments give equal output.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from maskserve_benchmarks.reports import write_json
from maskserve_benchmarks.simulator.capacity import at_load
from maskserve_benchmarks.simulator.hardware import DEVICES, MODELS, Hardware
from maskserve_benchmarks.simulator.result import Result, simulate
from maskserve_benchmarks.simulator.scenario import BATCHING, Scenario, Tiers
from maskserve_benchmarks.simulator.workload import MIXES, RING, Workload
from maskserve_common.routing import POLICIES
from maskserve_engine.planning.entry_bytes import FORMATS


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--bars", action="store_true", help="run the comparisons that must hold; exit 1 if not")
    add("--deadlines", action="store_true", help="due times on eight devices that share edits")
    add("--tetriserve", action="store_true", help="TetriServe's problem with published prices")
    add("--workflows", action="store_true", help="plans of nodes, beside LegoDiffusion's figures")
    add("--workflow-inputs", action="store_true", help="what --workflows takes, over a range of it")
    add("--json", type=Path, help="write all figures here")
    add("--plots", type=Path, metavar="FOLDER", help="of --deadlines: draw them there")
    add("--seed", type=int, default=1)
    add("--policy", choices=[*POLICIES, "all"], default="all")
    add("--workers", type=int, default=8, help="1 to 256")
    add("--edits", type=int, default=2000)
    add("--mix", choices=MIXES, default="public", help="distribution of mask ratios")
    add("--steps", type=int, nargs="+", default=[28], help="equally likely")
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument("--load", type=float, default=0.8, help="share of capacity (default: 0.8)")
    rate.add_argument("--rate", type=float, help="edits per second instead of a load")
    add("--burst", type=float, default=1.0, help="cv of gamma gaps; 1 is Poisson")
    add("--ring", type=int, default=RING, help="tokens computed round a square mask")
    add("--zipf", type=float, default=1.0, help="exponent of the templates' popularity")
    add("--templates", type=int, default=970)
    add("--batching", choices=BATCHING, default="continuous")
    add("--pre", type=float, default=0.0, help="seconds of preprocessing")
    add("--post", type=float, default=0.0, help="seconds of postprocessing")
    add("--max-rows", type=int, default=8)
    add("--max-waiting", type=int, default=100_000)
    add("--deadline", type=float, help="seconds after which edits are given up")
    add("--noise", type=float, default=0.0, help="deviation of log(step time)")
    add("--host-templates", type=int, help="templates a memory holds; default: all, everywhere")
    add("--disk-templates", type=int, default=0)
    add("--workers-per-host", type=int, default=1)
    add("--blind", action="store_true", help="the policy does not see where templates are")
    add("--device", choices=DEVICES, default="h100", help="by its published rates")
    add("--model", choices=MODELS, default=Hardware.model)
    add("--entry-format", choices=FORMATS, default=Hardware.entry_format)
    add("--stride", type=int, default=Hardware.stride, help="steps per anchor; 0: as it needs")
    add("--halo", type=int, default=Hardware.halo, help="[cache] conv_halo, of UNets")
    add("--overhead", type=float, help="fixed share of a dense step; default: estimated")
    args = parser.parse_args(arguments)
    if not 1 <= args.workers <= 256:
        parser.error("--workers: accepted: 1 to 256")
    if args.plots and not args.deadlines:
        parser.error("--plots: of --deadlines alone")
    if args.halo and args.model == "flux":
        parser.error("--halo: of UNets alone")
    for name in ("edits", "burst", "load", "max_rows", "templates", "workers_per_host"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')}: accepted: above 0")
    return args


def scenario_of(args: argparse.Namespace, hardware: Hardware) -> Scenario:
    tiers = None
    if args.host_templates is not None:
        tiers = Tiers(
            args.workers_per_host, args.host_templates, args.disk_templates, not args.blind
        )
    workload = Workload(
        args.edits,
        args.rate or 1.0,
        args.mix,
        tuple(args.steps),
        args.burst,
        args.templates,
        args.zipf,
        args.ring,
    )
    scenario = Scenario(
        workload,
        workers=args.workers,
        max_rows=args.max_rows,
        max_waiting=args.max_waiting,
        batching=args.batching,
        pre_seconds=args.pre,
        post_seconds=args.post,
        tiers=tiers,
        deadline=args.deadline,
        noise=args.noise,
    )
    return scenario if args.rate else at_load(scenario, hardware, args.load)


def show(result: Result) -> None:
    print(
        f"{result.policy:15} mean {result.mean:6.2f}  P50 {result.p50:6.2f}  "
        f"P95 {result.p95:6.2f}  P99 {result.p99:6.2f} s  goodput {result.goodput:5.2f}/s "
        f"({result.good_share:4.0%})  utilisation {result.utilisation:4.0%}  "
        f"rows {result.batch:4.2f}  fetches {result.fetches}  misses {result.misses}",
        flush=True,
    )


def one(args: argparse.Namespace) -> int:
    """Run one scenario under one or all policies."""
    hardware = Hardware(
        DEVICES[args.device],
        args.entry_format,
        args.stride,
        args.model,
        args.halo,
        overhead=args.overhead,
    )
    scenario = scenario_of(args, hardware)
    print(
        f"{args.workers} workers ({args.model} on {args.device}), {args.mix} masks, "
        f"{args.edits} edits at {scenario.workload.rate:.3f}/s, seed {args.seed}"
    )
    results = []
    for policy in POLICIES if args.policy == "all" else [args.policy]:
        result = simulate(replace(scenario, policy=policy), hardware, args.seed)
        show(result)
        results.append(result.to_json())
    report = {"rate": scenario.workload.rate, "seed": args.seed, "results": results}
    write_json(report, args.json)
    return 0


def bars(args: argparse.Namespace) -> int:
    from maskserve_studies.cluster.comparisons import run_bars

    report = run_bars(lambda line: print(line, flush=True))
    write_json(report, args.json)
    return 0 if report["met"] else 1


def deadlines(args: argparse.Namespace) -> int:
    from maskserve_studies.deadlines.simulation import run_deadlines

    report = run_deadlines(lambda line: print(line, flush=True), args.seed)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.plots:
        from maskserve_studies.deadlines.plots import draw

        draw(report, args.plots)
    return 0


def tetriserve(args: argparse.Namespace) -> int:
    from maskserve_studies.deadlines.tetriserve import run_tetriserve, tables

    report = run_tetriserve(lambda line: print(line, flush=True))
    write_json(report, args.json)
    print(*tables(report), sep="\n\n")
    return 0


def workflows(args: argparse.Namespace) -> int:
    from maskserve_studies.workflow_plans.figures import run_plans
    from maskserve_studies.workflow_plans.tables import gains_table, rates_table

    report = run_plans(lambda line: print(line, flush=True))
    write_json(report, args.json)
    print(rates_table(report), gains_table(report), sep="\n\n")
    return 0


def workflow_inputs(args: argparse.Namespace) -> int:
    from maskserve_studies.workflow_plans.inputs import run_inputs, tables

    report = run_inputs(lambda line: print(line, flush=True))
    write_json(report, args.json)
    print(*tables(report), sep="\n\n")
    return 0


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    if args.deadlines:
        return deadlines(args)
    if args.tetriserve:
        return tetriserve(args)
    if args.workflows:
        return workflows(args)
    if args.workflow_inputs:
        return workflow_inputs(args)
    return bars(args) if args.bars else one(args)
