"""Edits per second and latencies beside what people would use instead, on one machine.

    make bench          # quick: under a quarter of an hour on two cores
    make bench-full     # more edits, rounds and rates

Every system answers perf_analyzer's edits over gRPC: production mask ratios, a few templates that
are primed. First the rival is tuned (batch, delay, instances and threads), by edits per second with
8 in flight. Then, in turn and in rounds: edits per second at saturation (8 in flight), one edit
alone, and Poisson arrivals at shares of what the tuned rival can do. Writes results.json, the plots
and the page.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc_client
from skimage.metrics import structural_similarity

from maskserve_core.models.registry import counted_work, load_facts
from maskserve_harness.benchmarks.edit import large_model
from maskserve_harness.benchmarks.machine import machine, stolen_s
from maskserve_harness.checkout import CHECKOUT, DEMO_MODEL
from maskserve_harness.perf.command import CACHE
from maskserve_harness.perf.inputs import (
    Edit,
    InputOptions,
    find_photos,
    make_edits,
    write_edits,
)
from maskserve_harness.perf.load import Load, Target
from maskserve_harness.perf.results import Stamps
from maskserve_harness.perf.run import Measurement, measure
from maskserve_harness.perf.server import Server, own_server
from maskserve_harness.perf.tool import Tool, find_tool
from maskserve_harness.probing.calls import decode
from maskserve_harness.rivals.page import write_page
from maskserve_harness.rivals.server import Rival, RivalServer, rival_server

Figures = dict[str, Any]
IN_FLIGHT = 8
SLO = 2.0
"""Of the rival's latency alone: an answer within it is good."""
RUN_LIMIT_S = 1800.0
BARS = {
    "throughput_vs_diffusers": 3.0,
    "mean_latency_vs_diffusers_at_saturation": 14.7,
}
"""Of the larger model."""


@dataclass(frozen=True, slots=True)
class System:
    """What answers edits."""

    key: str
    label: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    rival: Rival | None = None
    """None: maskserve, with these settings."""


TUNINGS = (
    Rival("b1", "whole", batch=1),
    Rival("b4", "whole", batch=4, delay_ms=50),
    Rival("b8", "whole", batch=8),
    Rival("b8_delay", "whole", batch=8, delay_ms=200),
    Rival("b4_two", "whole", batch=4, instances=2, threads=1),
)


WAYS = {
    "whole": ("diffusers", "diffusers' pipeline"),
    "first_block_cache": ("first_block", "the same, FirstBlockCache 0.2"),
    "crop": ("crop", "the same, only a crop"),
}
"""Ways of `pipeline_model`, with their system's key and label."""


def variants() -> dict[tuple[str, str], Rival]:
    """Each way in each tuning, by their names."""
    return {
        (way, each.name): replace(each, name=f"{way}_{each.name}", way=way, threshold=0.2)
        for way in WAYS
        for each in TUNINGS
    }


def systems(tuning: Rival, model: str, rings: Sequence[int]) -> list[System]:
    """In the order of the paper's comparison. With random weights nobody can say which threshold
    FirstBlockCache may have, so the larger model goes without.
    """
    found = [
        System(key, label, rival=variants()[way, tuning.name])
        for way, (key, label) in WAYS.items()
        if model == "demo" or key != "first_block"
    ]
    found.append(System("dense", "maskserve, all tokens", {"cache": "off"}))
    found.append(System("maskserve", "maskserve"))
    found += [System(f"ring{n}", f"maskserve, ring {n}", {"mask_ring": n}) for n in rings]
    return found


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured of a model."""

    size: int
    """Of the pictures, pixels."""
    edits: int
    """Of a run."""
    alone: int
    """One at a time, of a run."""
    rounds: int
    rates: tuple[float, ...]
    """Shares of the rival's edits per second at saturation."""
    tunings: tuple[Rival, ...] = TUNINGS
    mixes: tuple[str, ...] = ("production",)
    judged: int = 8
    """Edits whose pictures are compared."""
    rings: tuple[int, ...] = ()
    """Further systems: maskserve with other rings than its own."""


_BOTH = ("production", "public")
QUICK = {
    "demo": Plan(128, 24, 4, 2, (1.0,), tuple(TUNINGS[n] for n in (0, 2, 4))),
    "bench": Plan(256, 12, 2, 1, (1.0,), tuple(TUNINGS[n] for n in (2, 4)), judged=2),
}
FULL = {
    "demo": Plan(128, 96, 8, 5, (0.5, 0.8, 1.0, 1.5), TUNINGS, _BOTH, rings=(0, 2)),
    "bench": Plan(256, 48, 4, 3, (0.5, 0.8, 1.0, 3.0), TUNINGS, _BOTH, rings=(0, 2)),
}


class Bench:
    """One model served by maskserve and by its rivals, both at hand and one at work.

    Args:
        tool: perf_analyzer.
        ours: maskserve's worker.
        theirs: the rivals' Triton.
        plan: how much is measured.
        folder: for files.
    """

    def __init__(
        self, tool: Tool, ours: Server, theirs: RivalServer, plan: Plan, folder: Path
    ) -> None:
        self._tool, self._ours, self._theirs = tool, ours, theirs
        self.plan, self._folder = plan, folder

    @contextmanager
    def serving(self, system: System) -> Iterator[None]:
        """Within it the system takes edits."""
        if system.rival is None:
            yield
            return
        with self._theirs.serving(system.rival):
            yield

    def edits(self, mix: str, settings: Mapping[str, Any], count: int) -> list[Edit]:
        options = InputOptions(self.plan.size, count, 4, mix, settings=dict(settings))
        return make_edits(options, find_photos(CHECKOUT / "assets"))

    def run(self, system: System, load: Load, count: int, mix: str = "production") -> Stamps:
        """Let perf_analyzer send edits.

        Raises:
            RuntimeError: an edit failed.
        """
        inputs = self._folder / f"{system.key}-{mix}.json"
        write_edits(self.edits(mix, system.settings, self.plan.edits), inputs)
        front, url = self._address(system)
        target = Target(front, "grpc")
        outcome = measure(self._tool, Measurement(target, load, url, count, inputs, 0, RUN_LIMIT_S))
        if outcome.stamps is None:
            raise RuntimeError(f"{system.key}: {'; '.join(outcome.errors)}")
        return outcome.stamps

    def _address(self, system: System) -> tuple[str, str]:
        """The model's name, and gRPC's host:port."""
        if system.rival is None:
            return "edit", self._ours.grpc
        return system.rival.name, self._theirs.grpc

    def pictures(self, system: System, edits: Sequence[Edit]) -> list[Any]:
        """What the system answers, one edit after the other."""
        shape = [1] if system.rival is None else [1, 1]
        front, url = self._address(system)
        made = []
        with self.serving(system), grpc_client.InferenceServerClient(url) as client:
            for edit in edits:
                asked = replace(edit, settings={**system.settings, **edit.settings})
                inputs = []
                for name, value in asked.tensors().items():
                    tensor = grpc_client.InferInput(name, shape, "BYTES")
                    tensor.set_data_from_numpy(np.array([value], object).reshape(shape))
                    inputs.append(tensor)
                answer = client.infer(front, inputs).as_numpy("IMAGE")
                made.append(decode(answer.reshape(-1)[0]))
        return made


def tuned(bench: Bench) -> tuple[Rival, list[Figures]]:
    """The rival with most edits per second at saturation, and what all had."""
    found, tunings = [], bench.plan.tunings
    for each in tunings:
        system = System(each.name, each.name, rival=variants()["whole", each.name])
        with bench.serving(system):
            count = max(IN_FLIGHT, bench.plan.edits // 2)
            stamps = bench.run(system, Load("concurrency", IN_FLIGHT), count)
        found.append(
            {
                "batch": each.batch,
                "delay_ms": each.delay_ms,
                "instances": each.instances,
                "threads": each.threads,
                "edits_per_s": round(stamps.answered_per_s, 3),
            }
        )
        say(f"  {each.name:9} {found[-1]['edits_per_s']:.2f} edits/s")
    best = max(range(len(found)), key=lambda n: float(found[n]["edits_per_s"]))
    return tunings[best], found


def measure_model(name: str, tool: Tool, folder: Path, plan: Plan) -> Figures:
    """All of one model."""
    model = DEMO_MODEL if name == "demo" else large_model(folder / "model")
    with (
        own_server(str(model), folder / "logs") as ours,
        rival_server(model, list(variants().values()), folder) as theirs,
    ):
        bench = Bench(tool, ours, theirs, plan, folder)
        for mix in plan.mixes:  # a template's second sight primes it
            ours.warm(2 * bench.edits(mix, {}, plan.edits))
        say(f"{name}: diffusers' pipeline, {IN_FLIGHT} in flight")
        best, tuning = tuned(bench)
        measured = systems(best, name, plan.rings)
        runs: dict[str, dict[str, list[Stamps]]] = {each.key: {} for each in measured}
        for number in range(plan.rounds):
            rate = 0.0
            for system in measured:
                with bench.serving(system):
                    rate = take_turn(bench, system, runs[system.key], rate)
                saturated = runs[system.key]["saturated production"][-1].answered_per_s
                say(f"  round {number + 1}: {system.label:30} {saturated:.2f} edits/s")
        drawn = bench.edits("production", {}, plan.edits)
        judged = drawn[: plan.judged]
        pictures = {each.key: bench.pictures(each, judged) for each in measured}
    slo_ms = SLO * statistics.median(s.latencies().mean for s in runs["diffusers"]["alone"])
    return {
        "pictures": f"{plan.size}x{plan.size}",
        "edits_per_run": plan.edits,
        "rounds": plan.rounds,
        "tuning": tuning,
        "slo_ms": round(slo_ms, 1),
        "flop_limit": round(flop_limit(model, drawn), 2),
        "systems": {
            each.key: {
                "label": each.label,
                **summed(runs[each.key], slo_ms),
                "likeness": alike(judged, pictures[each.key], pictures["diffusers"]),
            }
            for each in measured
        },
    }


def take_turn(bench: Bench, system: System, runs: dict[str, list[Stamps]], rate: float) -> float:
    """A system's turn in a round.

    Args:
        bench: of the model.
        system: whose turn it is.
        runs: by kind; those of this turn are added.
        rate: edits per second of the first system of the round at saturation; 0: this is it.

    Returns:
        that rate.
    """
    for mix in bench.plan.mixes:
        saturated = bench.run(system, Load("concurrency", IN_FLIGHT), bench.plan.edits, mix)
        runs.setdefault(f"saturated {mix}", []).append(saturated)
        rate = rate or saturated.answered_per_s
    alone = bench.run(system, Load("concurrency", 1), bench.plan.alone)
    runs.setdefault("alone", []).append(alone)
    for share in bench.plan.rates:
        stamps = bench.run(system, Load("request_rate", share * rate), bench.plan.edits)
        runs.setdefault(f"rate {share:g}", []).append(stamps)
    return rate


def summed(runs: Mapping[str, Sequence[Stamps]], slo_ms: float) -> Figures:
    """Of each kind of run the medians over rounds, and what the rounds spread."""
    told: Figures = {}
    for kind, stamps in runs.items():
        each = [s.latencies() for s in stamps]
        rates = [s.answered_per_s for s in stamps]
        good = [within(s, slo_ms) for s in stamps]
        told[kind] = {
            "sent_per_s": round(statistics.median(s.sent_per_s for s in stamps), 3),
            "edits_per_s": round(statistics.median(rates), 3),
            "spread": [round(min(rates), 3), round(max(rates), 3)],
            "seconds": round(statistics.median(_span(s) for s in stamps), 1),
            **{
                f"{name}_ms": round(statistics.median(getattr(one, name) for one in each), 1)
                for name in ("mean", "p50", "p95", "p99")
            },
            "good_share": round(statistics.median(good), 3),
        }
    return told


def _span(stamps: Stamps) -> float:
    return (max(r[-1] for r in stamps.responses) - stamps.sent[0]) / 1e9


def within(stamps: Stamps, slo_ms: float) -> float:
    """The share of edits that were answered within the SLO."""
    pairs = zip(stamps.sent, stamps.responses, strict=True)
    return float(np.mean([(r[-1] - sent) / 1e6 <= slo_ms for sent, r in pairs]))


def alike(edits: Sequence[Edit], pictures: Sequence[Any], reference: Sequence[Any]) -> Figures:
    """Likeness to the rival's whole pictures in the mask."""
    ssim, psnr = [], []
    for edit, ours, theirs in zip(edits, pictures, reference, strict=True):
        mask = decode(edit.mask)[..., 0] > 127
        _, each = structural_similarity(
            ours, theirs, channel_axis=2, data_range=255, gaussian_weights=True, full=True
        )
        error = (ours[mask].astype(float) - theirs[mask]) ** 2
        ssim.append(float(each[mask].mean()))
        psnr.append(10.0 * np.log10(255.0**2 / max(float(error.mean()), 1e-2)))
    return {
        "ssim_in_mask": round(statistics.mean(ssim), 4),
        "psnr_in_mask": round(statistics.mean(psnr), 2),
    }


def flop_limit(model: Path, edits: Sequence[Edit]) -> float:
    """Dense FLOPs of steps over those of cached ones, for these masks without a ring."""
    facts = load_facts(model)
    side = decode(edits[0].image).shape[0] // facts.vae_scale_factor
    work = counted_work(facts, side, side)
    rows = [work.row_at(edit.mask_ratio, 16) for edit in edits]
    dense, cached = (float(work.step_flops(rows, kind)) for kind in ("dense", "kv"))
    return dense / cached


def summary_of(report: Mapping[str, Any]) -> Figures:
    """The figures that have bars, of the larger model, and their companions."""
    bench, demo = report["bench"]["systems"], report["demo"]["systems"]

    def times(systems: Figures, kind: str, figure: str, other: str = "diffusers") -> float:
        ours, theirs = systems["maskserve"][kind][figure], systems[other][kind][figure]
        found = theirs / ours if figure.endswith("_ms") else ours / theirs
        return round(float(found), 2)

    saturated = "saturated production"
    throughput = times(bench, saturated, "edits_per_s")
    return {
        "throughput_vs_diffusers": throughput,
        "throughput_vs_diffusers_demo": times(demo, saturated, "edits_per_s"),
        "throughput_vs_dense": times(bench, saturated, "edits_per_s", "dense"),
        "throughput_vs_crop": times(bench, saturated, "edits_per_s", "crop"),
        "mean_latency_vs_diffusers_at_saturation": times(bench, "rate 1", "mean_ms"),
        "saturated_for_s": bench["diffusers"]["rate 1"]["seconds"],
        "ssim_in_mask": demo["maskserve"]["likeness"]["ssim_in_mask"],
        "of_flop_limit": round(
            times(bench, saturated, "edits_per_s", "dense") / report["bench"]["flop_limit"], 2
        ),
    }


def say(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--full", action="store_true", help="more edits, rounds and rates")
    parser.add_argument("--only", choices=tuple(QUICK), help="renew this model of --out")
    parser.add_argument("--out", type=Path, default=CHECKOUT / "docs" / "benchmarks" / "rivals")
    args = parser.parse_args()
    plans, report = (FULL if args.full else QUICK), dict[str, Any]()
    results = args.out / "results.json"
    args.out.mkdir(parents=True, exist_ok=True)
    if args.only and results.exists():
        report = json.loads(results.read_text(encoding="utf-8"))
    tool = find_tool(None, CACHE)
    begin, stolen = time.monotonic(), stolen_s()
    for name, plan in plans.items():
        if args.only in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                report[name] = measure_model(name, tool, Path(folder), plan)
    took = time.monotonic() - begin
    report["about"] = {
        "command": "make bench-full" if args.full else "make bench",
        "date": time.strftime("%Y-%m-%d"),
        "hardware": machine(),
        "commit": _commit(),
        "minutes": round(took / 60, 1),
        "stolen_share": round((stolen_s() - stolen) / took / (os.cpu_count() or 1), 3),
        "tool": tool.version,
    }
    if plans.keys() <= report.keys():
        report["summary"] = summary_of(report)
        write_page(report, args.out)
        say(json.dumps(report["summary"], indent=2))
    results.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    say(f"written: {args.out}")
    missed = [name for name, bar in BARS.items() if report.get("summary", {}).get(name, bar) < bar]
    for name in missed:
        say(f"MISSED: {name} is {report['summary'][name]}, under {BARS[name]:g}")
    return 0


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=CHECKOUT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
