"""Closer measurements of one model: new pictures, pictures of one size, batch sizes, mask ratios,
workers without a part, LoRAs.

They repeat FlashPS's Figs. 14 and 15 and its ablation with real workers, and serve LoRAs as often
as Katz measured. Systems that are compared take turns inside each round.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from maskserve_benchmarks.adapter_calls import SERVICES, draw_calls
from maskserve_benchmarks.perf.inputs import Edit, draw_mask
from maskserve_benchmarks.perf.load import Load
from maskserve_benchmarks.perf.results import Stamps
from maskserve_benchmarks.perf.server import Server, own_server, own_workers
from maskserve_benchmarks.rivals.measurement import (
    IN_FLIGHT,
    UNSEEN_STEPS,
    WARM,
    Bench,
    Figures,
    System,
    run_figures,
)
from maskserve_benchmarks.router_site import RouterSite
from maskserve_benchmarks.simulator.bars import (
    FEW_TOKENS_IDLE,
    H200_IDLE,
    batching,
    routing,
    routing_cases,
)
from maskserve_common.imaging.images import encode_image

Tables = Mapping[str, Mapping[str, Any]]
"""Tables of a configuration file."""
POLICIES = ("round_robin", "least_requests", "mask_aware")
ROUTED_LOAD = 0.8
"""Load behind the router, as a share of the capacity of two workers."""
ROUTING_REPEATS = 3
"""Times that the edits of a run are sent: P95 needs many edits."""
LORA_SHARE = 0.95
"""Share of production's edits that have a LoRA (Katz, section 3.1)."""
VARIANTS: Mapping[str, dict[str, Any]] = {
    "no batches: one edit at a time in each process": {"engine": {"max_rows": 1}},
    "no planner: every block takes its entry": {"cache": {"plan": "fixed"}},
    "weights of 8 bits (--weights int8)": {"model": {"weights": "int8"}},
}
"""Configurations of a worker: without one of its parts, or with other weights."""


def by_batch_size(bench: Bench, systems: Sequence[System]) -> Figures:
    """Return edits per second by system and number of edits in flight (Fig. 14)."""
    figures: Figures = {}
    for system in systems:
        with bench.serving(system):
            figures[system.key] = {
                str(n): bench.saturated(system, n, max(bench.plan.edits // 3, 2 * n))
                for n in bench.plan.batches
            }
    return figures


def by_mask_ratio(bench: Bench, systems: Sequence[System]) -> Figures:
    """Return milliseconds of one edit alone, by system and the mask's share of the picture (Fig.
    15).
    """
    figures: Figures = {}
    for system in systems:
        with bench.serving(system):
            figures[system.key] = {}
            for ratio in bench.plan.ratios:
                edits = edits_of_ratio(bench, ratio)
                stamps = bench.run(system, Load("concurrency", 1), bench.plan.alone, edits)
                figures[system.key][f"{ratio:g}"] = round(stamps.latencies().p50, 1)
    return figures


def unseen_pictures(bench: Bench, systems: Sequence[System]) -> Figures:
    """Return edits per second at saturation by system, when each edit has a new picture. Values are
    medians over as many rounds as other edits have. The result also has maskserve with primed
    templates at the same number of steps.
    """
    rates: dict[str, list[float]] = {key: [] for key in (*[s.key for s in systems], "primed")}
    step_settings = {"num_inference_steps": UNSEEN_STEPS}
    primed_edits = [
        replace(item, settings=item.settings | step_settings) for item in bench.edits("production")
    ]
    for number in range(bench.plan.rounds):
        for turn, system in enumerate(systems):
            edits = bench.unseen(number * len(systems) + turn)
            with bench.serving(system):
                rates[system.key].append(bench.saturated(system, IN_FLIGHT, len(edits), edits))
                if system.key == "maskserve":
                    primed = bench.saturated(system, IN_FLIGHT, len(edits), primed_edits)
                    rates["primed"].append(primed)
    return {key: round(statistics.median(item), 3) for key, item in rates.items()}


def one_size(bench: Bench, systems: Sequence[System]) -> Figures:
    """Return pictures per second at saturation by system, when all have one size, so that the
    pipeline can put any of them into one call. Values are medians over rounds.
    """
    edits = [
        replace(edit, settings={**edit.settings, "size": f"{bench.plan.size}x{bench.plan.size}"})
        for edit in bench.edits("production")
    ]
    rates: dict[str, list[float]] = {system.key: [] for system in systems}
    for _ in range(bench.plan.study_rounds):
        for system in systems:
            with bench.serving(system):
                rates[system.key].append(bench.saturated(system, IN_FLIGHT, len(edits), edits))
    return {key: round(statistics.median(values), 3) for key, values in rates.items()}


def edits_of_ratio(bench: Bench, ratio: float) -> list[Edit]:
    """Return the production mix's edits with masks of this ratio."""
    rng = np.random.default_rng(0)
    masked_edits = []
    for edit in bench.edits("production"):
        mask = draw_mask(bench.plan.size, ratio, rng)
        png = encode_image(mask * np.uint8(255), "png")
        masked_edits.append(replace(edit, mask=png, mask_ratio=float(mask.mean())))
    return masked_edits


def ablation(
    bench: Bench,
    model: Path,
    folder: Path,
    tables: Tables,
    running_benches: Mapping[str, Bench],
) -> Figures:
    """Measure maskserve in other configurations: edits per second at saturation and milliseconds of
    one edit alone, medians over rounds.

    Args:
        bench: bench of the model.
        model: folder of the model.
        folder: folder for files; each worker has its own below.
        tables: configuration of the bench's worker; each other configuration differs only in the
            part that its name says.
        running_benches: workers that already run, by name of their configuration.
    """
    with ExitStack() as running:
        benches = {"maskserve": bench, **running_benches}
        for number, (name, overrides) in enumerate(VARIANTS.items()):
            worker_folder = folder / f"otherwise{number}"
            merged = {
                table: {**tables.get(table, {}), **overrides.get(table, {})}
                for table in {**tables, **overrides}
            }
            server = running.enter_context(worker(model, worker_folder, merged))
            server.warm(2 * bench.edits("production")[:WARM])
            benches[name] = bench.at(server, worker_folder)
        rates: dict[str, list[float]] = {name: [] for name in benches}
        single_ms: dict[str, list[float]] = {name: [] for name in benches}
        for _ in range(bench.plan.study_rounds):
            for name, worker_bench in benches.items():
                system = System("ours", name)
                rates[name].append(worker_bench.saturated(system, IN_FLIGHT, bench.plan.edits))
                stamps = worker_bench.run(system, Load("concurrency", 1), bench.plan.alone)
                single_ms[name].append(stamps.latencies().p50)
    return {
        name: {
            "edits_per_s": round(statistics.median(rates[name]), 3),
            "alone_ms": round(statistics.median(single_ms[name]), 1),
        }
        for name in benches
    }


@contextmanager
def worker(model: Path, folder: Path, tables: Tables) -> Iterator[Server]:
    """Run a worker of maskserve while the context lasts.

    Args:
        model: folder of the model.
        folder: folder for files; this function makes it.
        tables: configuration of the worker.
    """
    folder.mkdir()
    config = folder / "maskserve.toml"
    config.write_text(tomli_w.dumps(tables), encoding="utf-8")
    with own_server(str(model), folder / "logs", config) as server:
        yield server


def by_policy(bench: Bench, model: Path, folder: Path) -> Figures:
    """Return P95 in milliseconds behind a router with each policy, medians over rounds (Fig. 16
    right). Two workers share the cores; arrivals are Poisson, the masks those of the public mix.

    Args:
        bench: bench of the model.
        model: folder of the model.
        folder: folder for files.
    """
    system, edits = System("ours", "behind a router"), bench.edits("public")
    p95: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    with ExitStack() as running:
        workers = running.enter_context(own_workers(str(model), folder / "routed", 2))
        benches = {}
        for policy in POLICIES:
            router_folder = folder / f"router-{policy}"
            router_folder.mkdir()
            addresses = [worker.grpc for worker in workers]
            site = RouterSite(addresses, router_folder, {"routing": {"policy": policy}})
            running.enter_context(site)
            benches[policy] = bench.at(Server(site.http_url, site.grpc_url), router_folder)
        for worker in workers:
            worker.warm(2 * edits[:WARM])
        full = benches[POLICIES[-1]].saturated(system, 2 * IN_FLIGHT, len(edits), edits)
        load = Load("request_rate", ROUTED_LOAD * full)
        for _ in range(bench.plan.study_rounds):
            for policy, policy_bench in benches.items():
                stamps = policy_bench.run(system, load, ROUTING_REPEATS * len(edits), edits)
                p95[policy].append(stamps.latencies().p95)
    return {
        "sent_per_s": round(load.value, 3),
        "edits": ROUTING_REPEATS * len(edits),
        "load": ROUTED_LOAD,
        "p95_ms": {policy: round(statistics.median(values), 1) for policy, values in p95.items()},
    }


def by_batching(bench: Bench, model: Path, folder: Path, tables: Tables) -> Figures:
    """Return milliseconds of edits, medians over rounds, of a worker with continuous batching and
    of one with static batching (Fig. 4 middle, Fig. 16 left). Arrivals are Poisson, at the plan's
    shares of the first worker's capacity; the masks are those of the production mix.

    Args:
        bench: bench of the model.
        model: folder of the model.
        folder: folder for files.
        tables: configuration of both workers.
    """
    system, edits = System("ours", "batching"), bench.edits("production")
    figures: Figures = {}
    with ExitStack() as running:
        benches = {}
        for batching in ("continuous", "static"):
            worker_folder = folder / f"batching-{batching}"
            engine = {**tables.get("engine", {}), "batching": batching}
            server = running.enter_context(
                worker(model, worker_folder, {**tables, "engine": engine})
            )
            server.warm(2 * edits[:WARM])
            benches[batching] = bench.at(server, worker_folder)
        full = benches["continuous"].saturated(system, IN_FLIGHT, len(edits))
        for share in bench.plan.rates:
            load = Load("request_rate", share * full)
            runs: dict[str, dict[str, list[Stamps]]] = {name: {"run": []} for name in benches}
            for _ in range(bench.plan.study_rounds):
                for name, worker_bench in benches.items():
                    runs[name]["run"].append(worker_bench.run(system, load, bench.plan.paced))
            figures[f"{share:g}"] = {"sent_per_s": round(load.value, 3)} | {
                name: {
                    key: run_figures(stamps, 0.0)["run"][key]
                    for key in ("mean_ms", "p50_ms", "p95_ms", "waited_ms")
                }
                for name, stamps in runs.items()
            }
    return figures


def with_loras(bench: Bench, systems: Sequence[System], names: Sequence[str]) -> Figures:
    """Return edits per second at saturation by system, for edits with LoRAs as often as in
    production.
    """
    edits = edits_with_loras(bench, names)
    bench.worker.warm(2 * edits)
    figures: Figures = {}
    for system in systems:
        with bench.serving(system):
            figures[system.key] = bench.saturated(system, IN_FLIGHT, len(edits), edits)
    return figures


def edits_with_loras(bench: Bench, names: Sequence[str]) -> list[Edit]:
    """Return the production mix with one LoRA on `LORA_SHARE` of the edits; popular LoRAs are more
    frequent.

    Popularity is that of Katz's service B, its first adapters by rank. The share of the remaining
    adapters is divided among them.
    """
    edits = bench.edits("production")
    rng = np.random.default_rng(0)
    calls = draw_calls(SERVICES[1], len(edits), 0)
    lora_edits = []
    for edit, call in zip(edits, calls, strict=True):
        loras = [{"name": names[call % len(names)], "scale": 0.8}]
        lora_settings = {"loras": loras} if rng.random() < LORA_SHARE else {}
        lora_edits.append(replace(edit, settings={**edit.settings, **lora_settings}))
    return lora_edits


def simulate() -> Figures:
    """Simulate what one machine cannot show: batching and routing at a production rate.

    The first case is that of FlashPS section 6.4: one FLUX worker and 0.5 edits per second. Half of
    a dense step is fixed, or the share that is fixed on an H200. The second case has eight workers
    at 95 % load. Values are shares of P95:
    `p95_vs_static` 0.35 means that the P95 of static batching is 35 % above that of continuous
    batching. `p95_vs_least_requests` 0.26 means that the P95 of mask_aware is 26 % below that of
    least_requests.
    """
    paper, h200 = batching(rates=(0.5,), overheads=(FEW_TOKENS_IDLE, H200_IDLE))
    [case] = [c for c in routing_cases() if c.name == "public" and c.load == 0.95]
    under = routing(case, ("round_robin", "least_requests", "mask_aware"))["under"]
    return {
        "p95_vs_static": round(paper["over"]["static"], 3),
        "p95_vs_static_h200": round(h200["over"]["static"], 3),
        "p95_vs_strawman": round(paper["over"]["strawman"], 3),
        "p95_vs_least_requests": round(under["least_requests"]["margin"], 3),
        "p95_vs_round_robin": round(under["round_robin"]["margin"], 3),
    }
