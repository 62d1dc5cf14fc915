"""Compare edits per second and latencies with the alternatives that people would use, on one
machine.

    make bench          # quick: 18 minutes on a 2-core AMD EPYC (2026-11-27), 34 on an Intel Xeon
    make bench-full     # more edits, rounds and rates: an hour and a half

Every system answers perf_analyzer's edits over gRPC, with production mask ratios and a few primed
templates. Both sides are tuned first, by edits per second with 8 in flight: the rival's batch,
delay, instances and threads, and the way in which maskserve shares the cores (`best_share`). Then
the systems take turns in rounds: saturation (8 in flight), one edit alone, and Poisson arrivals at
shares of the rival's rate. Closer studies follow (`one_model`): batch sizes, mask ratios, workers
without a part, LoRAs. `pictures` is text to image of mixed sizes, `adapters` text to image with as
many ControlNets and LoRAs as Katz measured, both beside diffusers' text-to-image pipelines. The
command writes results.json, the plots and the page.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from skimage.metrics import structural_similarity

from maskserve_benchmarks.checkout import CHECKOUT, DEMO_EDIT, DEMO_MODEL
from maskserve_benchmarks.edits.edit import large_model
from maskserve_benchmarks.edits.lora_edits import write_loras
from maskserve_benchmarks.machine import machine, stolen_s
from maskserve_benchmarks.perf.command import CACHE
from maskserve_benchmarks.perf.inputs import Edit
from maskserve_benchmarks.perf.load import Load
from maskserve_benchmarks.perf.results import Stamps
from maskserve_benchmarks.perf.tool import Tool, find_tool
from maskserve_benchmarks.reports import write_json
from maskserve_benchmarks.rivals import one_model
from maskserve_benchmarks.rivals.adapters import LORAS, NETS, picture_unet, write_adapters
from maskserve_benchmarks.rivals.measurement import (
    IN_FLIGHT,
    SLO,
    TUNINGS,
    WARM,
    Bench,
    Figures,
    Plan,
    Rivals,
    System,
    run_figures,
    systems,
    variants,
)
from maskserve_benchmarks.rivals.page import write_page
from maskserve_benchmarks.rivals.server import Rival, rival_server
from maskserve_benchmarks.triton_calls import decode
from maskserve_common.config import cores
from maskserve_engine.families.specs import counted_work, load_spec
from maskserve_engine.layers import onednn

BARS = {
    "throughput_vs_diffusers": 3.0,
    "mean_latency_vs_diffusers_at_saturation": 14.7,
    "unseen_vs_diffusers": 2.8,
    "primed_vs_diffusers": 5.0,
    "primed_vs_diffusers_demo": 2.5,
    "pictures_vs_diffusers": 1.0,
    "pictures_p95_vs_diffusers": 1.3,
    "p95_vs_static": 0.35,
    "p95_vs_strawman": 0.40,
    "p95_vs_least_requests": 0.26,
}
"""Bars of the figures. The first five hold for measurements of the larger model, or of the demo
model if the name ends in `_demo`; `unseen` and `primed` compare runs with the same number of steps.
`pictures` are text to image of mixed sizes: at saturation, and P95 at the pipeline's own rate. The
other bars hold for simulated figures, and no bar for `adapters`."""


_TURNS = 3
_CLEARLY = 1.05
"""Ratio of rates from which the faster side wins; below it the result is a draw."""
_AT_ONCE = 1.5
"""Ratio of rates in one turn from which further turns cannot change the result."""
_MIXES = ("production", "public")
_SATURATED = "saturated production"
_SIZES = ("64x64", "96x96", "160x96", "128x128")
"""Sizes of text to image, equally often: a quarter of the model's area to all of it."""
_CURVES: dict[str, Any] = {
    "batches": (1, 2, 4, 8),
    "ratios": (0.05, 0.1, 0.2, 0.35, 0.5, 0.8),
    "ablation": True,
}
QUICK = {
    "demo": Plan(
        128, 24, 4, 3, (1.0,), 24, 60.0, tuple(TUNINGS[n] for n in (2, 4)), everywhere=False,
        batches=(1, 4, 8), ratios=(0.1, 0.35, 0.8), ablation=True, loras=True, study_rounds=1,
        unseen=24,
    ),
    "bench": Plan(
        256, 12, 2, 1, (1.0,), 30, 300.0, TUNINGS[4:], judged=2, everywhere=False,
        ratios=(0.1, 0.35), study_rounds=1, unseen=16,
    ),
    "pictures": Plan(
        128, 24, 4, 3, (1.0,), 36, 60.0, tuple(TUNINGS[n] for n in (2, 4)), study_rounds=1,
        kind="generate", sizes=_SIZES,
    ),
    "adapters": Plan(
        128, 24, 4, 2, (1.0,), 36, 120.0, tuple(TUNINGS[n] for n in (2, 4)), kind="generate",
        steps=10, adapters=True,
    ),
}  # fmt: skip
FULL = {
    "demo": Plan(
        128, 48, 8, 3, (0.5, 0.8, 1.0, 1.5), 48, 240.0, TUNINGS, _MIXES, rings=(0, 2), routed=True,
        loras=True, unseen=48, **_CURVES,
    ),
    "bench": Plan(
        256, 16, 3, 2, (0.5, 1.0), 30, 600.0, TUNINGS, _MIXES, judged=4, everywhere=False,
        rings=(0, 2), unseen=32, **_CURVES,
    ),
    "pictures": Plan(
        128, 48, 8, 3, (0.5, 0.8, 1.0), 72, 240.0, TUNINGS, kind="generate", sizes=_SIZES
    ),
    "adapters": Plan(
        128, 48, 8, 3, (0.5, 0.8, 1.0), 72, 240.0, TUNINGS, kind="generate", adapters=True
    ),
}  # fmt: skip


def core_shares(tables: one_model.Tables) -> dict[str, one_model.Tables]:
    """Return configurations of maskserve's worker, by the way in which it shares the cores.

    Args:
        tables: what they have in common.
    """
    processes = max(n for n in (1, 2, 4, 8) if n <= cores())
    shares = {"one process with all cores": 1}
    if processes > 1:
        shares[f"a process per core (--devices-per-worker {processes})"] = processes
    return {share: {"engine": {"devices": devices}, **tables} for share, devices in shares.items()}


def rates_of(benches: Mapping[str, Bench]) -> dict[str, float]:
    """Return edits per second at saturation of maskserve's workers, which have just started:
    medians of `_TURNS` turns, or of one if it decides. The workers take turns.
    """
    for bench in benches.values():
        times = 2 if bench.plan.kind == "inpaint" else 1  # a template's second edit primes it
        for mix in bench.plan.mixes:
            bench.worker.warm(times * bench.edits(mix)[:WARM])
    turns = {share: list[float]() for share in benches}
    for _ in range(_TURNS):
        for share, bench in benches.items():
            rate = bench.saturated(System("maskserve", share), IN_FLIGHT, bench.plan.edits)
            turns[share].append(rate)
        *slower_rates, fastest_rate = sorted(rates[-1] for rates in turns.values())
        if fastest_rate > _AT_ONCE * max(slower_rates, default=0.0):
            break
    for share, rates in turns.items():
        say(f"  {share:45} {' '.join(f'{rate:.2f}' for rate in rates)} edits/s")
    return {share: statistics.median(rates) for share, rates in turns.items()}


def best_share(rates: Mapping[str, float]) -> str:
    """Return the way to share the cores for the measurement. It is the first way, the default of
    operators, unless another way has clearly more edits per second. The choice changes latencies
    far more than rates, so a draw must not decide it.
    """
    default, *_ = rates
    fastest = max(rates, key=lambda share: rates[share])
    return fastest if rates[fastest] > _CLEARLY * rates[default] else default


def tune_rival(bench: Bench, rivals: Rivals) -> tuple[Rival, list[Figures]]:
    """Return the rival with most edits per second at saturation, and the figures of all."""
    results, tunings = [], bench.plan.tunings
    for tuning in tunings:
        system = System(tuning.name, tuning.name, rival=rivals["whole", tuning.name])
        with bench.serving(system):
            count = max(IN_FLIGHT, bench.plan.edits // 2)
            stamps = bench.run(system, Load("concurrency", IN_FLIGHT), count)
        results.append(
            {
                "batch": tuning.batch,
                "delay_ms": tuning.delay_ms,
                "instances": tuning.instances,
                "threads": tuning.threads,
                "edits_per_s": round(stamps.answered_per_s, 3),
            }
        )
        say(f"  {tuning.name:9} {results[-1]['edits_per_s']:.2f} edits/s")
    best = max(range(len(results)), key=lambda n: float(results[n]["edits_per_s"]))
    return tunings[best], results


def measure_model(name: str, tool: Tool, folder: Path, plan: Plan) -> Figures:
    """Measure everything for one model."""
    small = {"demo": DEMO_MODEL, "pictures": DEMO_EDIT}
    make = picture_unet if plan.adapters else large_model
    model = small[name] if name in small else make(folder / "model")
    store, loras, rivals = folder / "loras", list[str](), variants()
    tables = {"adapters": {"store": str(store)}}
    if plan.adapters:
        write_adapters(folder, NETS, LORAS)
        tables["controls"] = {"folder": str(folder / "nets")}
        rivals = variants(str(store), str(folder / "nets"))
    else:
        store.mkdir()
        loras = write_loras(store) if plan.loras else []
    served = list(rivals.values())
    served += [with_loras(item, store) for item in served if item.mode == "whole"]
    with ExitStack() as running:
        rivals_server = running.enter_context(rival_server(model, served, folder))
        say(f"{name}: maskserve, {IN_FLIGHT} in flight")
        shares, benches = core_shares(tables), dict[str, Bench]()
        for number, (share, shared_tables) in enumerate(shares.items()):
            server_folder = folder / f"maskserve{number}"
            server = running.enter_context(one_model.worker(model, server_folder, shared_tables))
            benches[share] = Bench(tool, server, rivals_server, plan, server_folder)
        share_rates = rates_of(benches)
        share_name = best_share(share_rates)
        bench = benches.pop(share_name)
        say(f"{name}: diffusers' pipeline, {IN_FLIGHT} in flight")
        best, tuning = plan.tunings[0], list[Figures]()
        if len(plan.tunings) > 1:
            best, tuning = tune_rival(bench, rivals)
        all_systems = systems(rivals, best, name, plan.rings)
        edits = bench.edits("production")
        judged = edits[: plan.judged]
        runs, pictures = run_rounds(bench, all_systems, judged)
        say(f"{name}: studies")
        studies = run_studies(
            bench,
            {item.key: item for item in all_systems},
            model,
            folder,
            shares[share_name],
            benches,
            loras,
        )
    slo_ms = SLO * statistics.median(s.latencies().mean for s in runs["diffusers"]["alone"])
    return {
        "pictures": ", ".join(plan.sizes) or f"{plan.size}x{plan.size}",
        "edits_per_run": plan.edits,
        "rounds": plan.rounds,
        "tuning": tuning,
        "own_tuning": share_rates,
        "slo_ms": round(slo_ms, 1),
        **({"flop_limit": round(flop_limit(model, edits), 2)} if plan.kind == "inpaint" else {}),
        "studies": studies,
        "systems": {
            item.key: {
                "label": item.label,
                **run_figures(runs[item.key], slo_ms),
                "likeness": likeness(judged, pictures[item.key], pictures["diffusers"]),
            }
            for item in all_systems
        },
    }


def run_rounds(
    bench: Bench, all_systems: list[System], judged: list[Any]
) -> tuple[dict[str, dict[str, list[Stamps]]], dict[str, list[Any]]]:
    """Run all rounds; return the runs of each system by kind, and its pictures of judged edits."""
    runs: dict[str, dict[str, list[Stamps]]] = {item.key: {} for item in all_systems}
    pictures = dict[str, list[Any]]()
    for number in range(bench.plan.rounds):
        rate = 0.0
        for system in all_systems:
            with bench.serving(system):
                rate = take_turn(bench, system, runs[system.key], rate)
                if not number:
                    pictures[system.key] = bench.pictures(system, judged)
            saturated = runs[system.key]["saturated production"][-1].answered_per_s
            say(f"  round {number + 1}: {system.label:30} {saturated:.2f} edits/s")
    return runs, pictures


def run_studies(
    bench: Bench,
    by_key: dict[str, System],
    model: Path,
    folder: Path,
    tables: one_model.Tables,
    other_benches: dict[str, Bench],
    loras: list[str],
) -> Figures:
    """Run the studies of the bench's plan.

    Args:
        bench: bench of the fastest setting of maskserve.
        by_key: all systems.
        model: the model's folder.
        folder: for files.
        tables: configuration of the bench's maskserve.
        other_benches: benches of the other settings.
        loras: names of the LoRAs.
    """
    plan = bench.plan
    compared = [by_key[key] for key in ("diffusers", "dense", "maskserve") if key in by_key]
    studies: Figures = {}
    if plan.unseen:
        say("  pictures never seen")
        studies["unseen"] = one_model.unseen_pictures(bench, compared)
    if plan.sizes:
        say("  pictures of one size")
        studies["one_size"] = one_model.one_size(bench, compared)
    if plan.batches:
        say("  batch sizes")
        studies["batch_size"] = one_model.by_batch_size(bench, compared)
    if plan.ratios:
        say("  mask ratios")
        studies["mask_ratio"] = one_model.by_mask_ratio(bench, compared)
    if plan.ablation:
        say("  parts left out")
        studies["ablation"] = one_model.ablation(bench, model, folder, tables, other_benches)
    if plan.routed:
        say("  policies of routing")
        studies["routing"] = one_model.by_policy(bench, model, folder)
    if plan.loras:
        say("  LoRAs")
        whole = by_key["diffusers"]
        assert whole.rival is not None
        pipeline = replace(whole, rival=with_loras(whole.rival, folder / "loras"))
        studies["loras"] = one_model.with_loras(bench, [pipeline, by_key["maskserve"]], loras)
    return studies


def with_loras(rival: Rival, store: Path) -> Rival:
    return replace(rival, name=f"{rival.name}_loras", loras=str(store))


def take_turn(bench: Bench, system: System, runs: dict[str, list[Stamps]], rate: float) -> float:
    """Run one system's turn of a round.

    Args:
        bench: bench of the model.
        system: the system to measure.
        runs: runs by kind; this turn's runs are added.
        rate: edits per second at saturation of the first system of the round; 0: this is the first
            system.

    Returns:
        the rate of the round's first system.
    """
    for mix in bench.plan.mixes:
        saturated = bench.run(
            system, Load("concurrency", IN_FLIGHT), bench.plan.edits, bench.edits(mix)
        )
        runs.setdefault(f"saturated {mix}", []).append(saturated)
        rate = rate or saturated.answered_per_s
    single_run = bench.run(system, Load("concurrency", 1), bench.plan.alone)
    runs.setdefault("alone", []).append(single_run)
    paced = bench.plan.everywhere or system.key in ("diffusers", "maskserve")
    for share in bench.plan.rates if paced else ():
        stamps = bench.run(system, Load("request_rate", share * rate), bench.plan.paced)
        runs.setdefault(f"rate {share:g}", []).append(stamps)
    return rate


def likeness(edits: Sequence[Edit], pictures: Sequence[Any], reference: Sequence[Any]) -> Figures:
    """Compare pictures in the mask with the rival's whole pictures; without a mask compare all
    pixels.
    """
    ssim, psnr = [], []
    for edit, picture, reference_picture in zip(edits, pictures, reference, strict=True):
        shape = picture.shape[:2]
        mask = decode(edit.mask)[..., 0] > 127 if edit.mask else np.ones(shape, np.bool_)
        _, ssim_map = structural_similarity(
            picture,
            reference_picture,
            channel_axis=2,
            data_range=255,
            gaussian_weights=True,
            full=True,
        )
        error = (picture[mask].astype(float) - reference_picture[mask]) ** 2
        ssim.append(float(ssim_map[mask].mean()))
        psnr.append(10.0 * np.log10(255.0**2 / max(float(error.mean()), 1e-2)))
    return {
        "ssim_in_mask": round(statistics.mean(ssim), 4),
        "psnr_in_mask": round(statistics.mean(psnr), 2),
    }


def flop_limit(model: Path, edits: Sequence[Edit]) -> float:
    """Return dense FLOPs over cached FLOPs of these edits' steps, with masks without a ring."""
    spec = load_spec(model)
    side = decode(edits[0].image).shape[0] // spec.vae_scale_factor
    work = counted_work(spec, side, side)
    rows = [work.row_at(edit.mask_ratio, 16) for edit in edits]
    dense, cached = (float(work.step_flops(rows, kind)) for kind in ("dense", "kv"))
    return dense / cached


def summary_of(report: Mapping[str, Any]) -> Figures:
    """Return the larger model's figures that have bars, and the figures that explain them."""
    bench, demo = report["bench"]["systems"], report["demo"]["systems"]
    throughput = _times(bench, _SATURATED, "edits_per_s")
    return {
        "throughput_vs_diffusers": throughput,
        "throughput_vs_diffusers_demo": _times(demo, _SATURATED, "edits_per_s"),
        "throughput_vs_dense": _times(bench, _SATURATED, "edits_per_s", "dense"),
        "throughput_vs_crop": _times(bench, _SATURATED, "edits_per_s", "crop"),
        **_unseen_figures(report["bench"], ""),
        **_unseen_figures(report["demo"], "_demo"),
        **_picture_figures(report),
        "mean_latency_vs_diffusers_at_saturation": _times(bench, "rate 1", "mean_ms"),
        "saturated_for_s": bench["diffusers"]["rate 1"]["seconds"],
        "ssim_in_mask": demo["maskserve"]["likeness"]["ssim_in_mask"],
        "of_flop_limit": round(
            _times(bench, _SATURATED, "edits_per_s", "dense") / report["bench"]["flop_limit"], 2
        ),
        **report["simulated"],
    }


def _times(systems: Figures, kind: str, figure: str, other: str = "diffusers") -> float:
    """Return how many times better maskserve's figure of this kind of run is than the other's."""
    maskserve_figure, rival_figure = (
        float(systems[name][kind][figure]) for name in ("maskserve", other)
    )
    if figure.endswith("_ms"):
        maskserve_figure, rival_figure = rival_figure, maskserve_figure
    return round(maskserve_figure / rival_figure, 2)


def _picture_figures(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of text to image, as far as it was measured."""
    figures = {}
    for name in ("pictures", "adapters"):
        if name in report:
            systems = report[name]["systems"]
            figures[f"{name}_vs_diffusers"] = _times(systems, _SATURATED, "edits_per_s")
            figures[f"{name}_p95_vs_diffusers"] = _times(systems, "rate 1", "p95_ms")
    return figures


def _unseen_figures(model: Figures, name: str) -> dict[str, float]:
    """Return the figures of the study of new pictures, if there was one."""
    rates = model["studies"].get("unseen")
    if rates is None:
        return {}
    times = {key: round(rate / rates["diffusers"], 2) for key, rate in rates.items()}
    return {
        f"unseen_vs_diffusers{name}": times["maskserve"],
        f"primed_vs_diffusers{name}": times["primed"],
    }


def say(line: str) -> None:
    """Print a line with the minutes since this process started."""
    minutes = (time.time() - psutil.Process().create_time()) / 60.0
    print(f"{minutes:5.1f} min  {line}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--full", action="store_true", help="more edits, rounds and rates")
    parser.add_argument("--only", choices=tuple(QUICK), help="renew this model of --out")
    parser.add_argument(
        "--page", action="store_true", help="write the page of what was measured; simulate anew"
    )
    parser.add_argument("--out", type=Path, help="folder; by default below docs/benchmarks")
    args = parser.parse_args()
    plans, report = (FULL if args.full else QUICK), dict[str, Any]()
    out = args.out or CHECKOUT / "docs/benchmarks" / ("rivals-full" if args.full else "rivals")
    results = out / "results.json"
    if args.page:
        report = json.loads(results.read_text(encoding="utf-8"))
        report["simulated"] = one_model.simulate()
        report["summary"] = summary_of(report)
        write_json(report, results)
        write_page(report, out)
        return 0
    out.mkdir(parents=True, exist_ok=True)
    if args.only and results.exists():
        report = json.loads(results.read_text(encoding="utf-8"))
    tool = find_tool(None, CACHE)
    begin, stolen = time.monotonic(), stolen_s()
    for name, plan in plans.items():
        if args.only in (None, name):
            with tempfile.TemporaryDirectory() as scratch:
                report[name] = measure_model(name, tool, Path(scratch), plan)
            write_json(report, results)  # save now: with --full a model takes an hour
    took = time.monotonic() - begin
    about = {
        "command": "make bench-full" if args.full else "make bench",
        "date": time.strftime("%Y-%m-%d"),
        "hardware": machine(),
        "onednn": onednn.is_faster(),
        "commit": _commit(),
        "minutes": round(took / 60, 1),
        "stolen_share": round((stolen_s() - stolen) / took / (os.cpu_count() or 1), 3),
        "tool": tool.version,
    }
    if args.only and "about" in report:
        command = f"scripts/bench end_to_end --only {args.only}"
        report[args.only]["about"] = about | {"command": command}
    else:
        report["about"] = about
    if plans.keys() <= report.keys():
        say("simulated")
        report["simulated"] = one_model.simulate()
        report["summary"] = summary_of(report)
        write_page(report, out)
        print(json.dumps(report["summary"], indent=2), flush=True)
    write_json(report, results)
    say(f"written: {out}")
    missed = [name for name, bar in BARS.items() if report.get("summary", {}).get(name, bar) < bar]
    for name in missed:
        say(f"MISSED: {name} is {report['summary'][name]}, under {BARS[name]:g}")
    return 0


def _commit() -> str:
    process = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=CHECKOUT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    return process.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
