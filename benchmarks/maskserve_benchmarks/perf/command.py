"""Load a worker with perf_analyzer, Triton's own load generator: real pictures, Poisson arrivals.

    python scripts/bench perf_analyzer --json perf.json
    python scripts/bench perf_analyzer --front edit --protocol http --request-rate 0.5,1
    python scripts/bench perf_analyzer --url localhost:9001 --concurrency 1,4,8 --size 256

Measures `edit` over HTTP and gRPC and `edit_stream` over gRPC streaming, against a worker of its
own or a running one, and prints a table. perf_analyzer is installed in .cache on first use.
A latency ends with the final answer. With --progress edit_stream sends a response per step; the
table and the JSON then also have the time to the first response.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from maskserve_benchmarks.checkout import CHECKOUT, DEMO_MODEL
from maskserve_benchmarks.machine import machine
from maskserve_benchmarks.perf.errors import PerfError
from maskserve_benchmarks.perf.inputs import (
    Edit,
    InputOptions,
    find_photos,
    make_edits,
    write_edits,
)
from maskserve_benchmarks.perf.load import FRONTS, PROTOCOLS, Load, parse_loads, targets
from maskserve_benchmarks.perf.report import HEADER, line
from maskserve_benchmarks.perf.run import Measurement, measure
from maskserve_benchmarks.perf.server import Server, own_server, running_server
from maskserve_benchmarks.perf.tool import Tool, find_tool
from maskserve_benchmarks.simulator.workload import MIXES
from maskserve_common.contracts.request import EDIT_KINDS
from maskserve_common.contracts.settings import CACHE_MODES
from maskserve_serving.errors import ServeError

CACHE = CHECKOUT / ".cache" / "perf_analyzer"
LOGS = CHECKOUT / "logs" / "perf_analyzer"
DEFAULT_RATES = "1,2,4"


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    # A plain kill ends tool and worker in the same way as Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run(options)
    except (PerfError, ServeError, OSError) as error:
        print(f"perf_analyzer: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("perf_analyzer: interrupted; what it started is stopped", file=sys.stderr)
        return 130


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    summary, _, epilog = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    measured_group = parser.add_argument_group("what is measured")
    measured_group.add_argument("--front", choices=FRONTS, help="one front; default: both")
    measured_group.add_argument("--protocol", choices=PROTOCOLS, help="one protocol; default: both")
    measured_group.add_argument(
        "--all", action="store_true", help="every front and protocol: the default"
    )
    where = measured_group.add_mutually_exclusive_group()
    demo = str(DEMO_MODEL)
    where.add_argument("--model", default=demo, help="folder or hub id that an own worker serves")
    where.add_argument("--url", metavar="HOST:PORT", help="gRPC address of a running worker")
    measured_group.add_argument(
        "--http-url", metavar="HOST:PORT", help="with --url; default: the port before"
    )
    load = parser.add_argument_group("load")
    how = load.add_mutually_exclusive_group()
    how.add_argument(
        "--request-rate",
        metavar="N,…",
        help=f"edits per second on average, Poisson arrivals; default {DEFAULT_RATES}",
    )
    how.add_argument("--concurrency", metavar="N,…", help="edits always in flight")
    load.add_argument(
        "--built-in-arrivals",
        action="store_true",
        help="perf_analyzer's own Poisson arrivals, slower than asked for in short runs",
    )
    load.add_argument("--requests", type=int, default=60, help="edits per run")
    load.add_argument(
        "--warmup",
        type=int,
        help="edits before the first run; default: --entries, or --requests if that is less",
    )
    load.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="limit of one run; one that takes longer is tried twice more, as perf_analyzer may "
        "miss its own signal to start",
    )
    edits = parser.add_argument_group("edits")
    edits.add_argument("--kind", choices=EDIT_KINDS, default="inpaint", help="edits by pictures")
    edits.add_argument("--references", type=int, default=0, help="further pictures of each edit")
    edits.add_argument("--strength", type=float, help="the setting `strength`")
    edits.add_argument("--size", type=int, default=128, help="sides of the pictures, pixels")
    edits.add_argument("--steps", type=int, default=8, help="denoising steps")
    edits.add_argument("--cache", choices=CACHE_MODES, default="auto", help="the setting `cache`")
    edits.add_argument("--mix", choices=sorted(MIXES), default="production", help="mask ratios")
    edits.add_argument("--entries", type=int, default=32, help="different edits, sent in turn")
    edits.add_argument("--templates", type=int, default=8, help="different pictures among them")
    edits.add_argument("--seed", type=int, default=0, help="of edits and arrivals")
    edits.add_argument("--progress", action="store_true", help="edit_stream: an event per step")
    other_group = parser.add_argument_group("other")
    other_group.add_argument("--tool", type=Path, help="an installed perf_analyzer")
    other_group.add_argument("--json", type=Path, help="file for the results")
    other_group.add_argument(
        "--hardware", default=machine(), help="what the worker runs on, in words"
    )
    options = parser.parse_args(argv)
    if options.all and (options.front or options.protocol):
        parser.error("--all: not with --front or --protocol")
    if options.http_url and not options.url:
        parser.error("--http-url: only with --url")
    return options


def run(options: argparse.Namespace) -> int:
    """Run everything in order; invalid options are refused before anything starts."""
    measured = targets(options.front, options.protocol)
    loads = chosen_loads(options)
    check_numbers(options)
    settings: dict[str, Any] = {"num_inference_steps": options.steps, "cache": options.cache}
    settings["progress"] = options.progress  # `edit` sends one response in any case
    if options.strength is not None:
        settings["strength"] = options.strength
    edits = make_edits(
        InputOptions(
            size=options.size,
            entries=options.entries,
            templates=options.templates,
            mix=options.mix,
            kind=options.kind,
            references=options.references,
            seed=options.seed,
            settings=settings,
        ),
        find_photos(CHECKOUT / "assets"),
    )
    tool = find_tool(options.tool, CACHE)
    outcomes = []
    server: AbstractContextManager[Server]
    if options.url:
        server = nullcontext(running_server(options.url, options.http_url))
    else:
        print(f"starting Triton with {options.model}; its log is in {LOGS}", flush=True)
        server = own_server(options.model, LOGS)
    with tempfile.TemporaryDirectory() as folder, server as worker:
        inputs = Path(folder) / "edits.json"
        write_edits(edits, inputs)
        warm(worker, edits, options)
        about = describe(options, tool, edits, (worker.status() or {}).get("model"))
        print(HEADER, flush=True)
        runs = []
        for target in measured:
            for load in loads:
                worker.wait_ready()
                counters_before = worker.counters()
                url = worker.url(target.protocol)
                outcome = measure(
                    tool,
                    Measurement(
                        target, load, url, options.requests, inputs, options.seed, options.timeout
                    ),
                )
                outcomes.append(outcome)
                runs.append(
                    {**outcome.to_json(), "worker_counters": worker.growth(counters_before)}
                )
                print(line(outcome), flush=True)
    if options.json:
        text = json.dumps({**about, "runs": runs}, indent=2, ensure_ascii=False)
        options.json.write_text(text + "\n", encoding="utf-8")
        print(f"written: {options.json}")
    return 1 if any(outcome.errors for outcome in outcomes) else 0


def chosen_loads(options: argparse.Namespace) -> list[Load]:
    if options.concurrency:
        return parse_loads("concurrency", options.concurrency)
    return parse_loads(
        "request_rate", options.request_rate or DEFAULT_RATES, options.built_in_arrivals
    )


def check_numbers(options: argparse.Namespace) -> None:
    """Raise on numbers that no later part checks."""
    if options.requests < 2:
        raise PerfError(f"--requests: {options.requests} is not at least 2")
    if options.warmup is not None and options.warmup < 0:
        raise PerfError(f"--warmup: {options.warmup} is not at least 0")
    if not options.timeout > 0:
        raise PerfError(f"--timeout: {options.timeout:g} is not above 0")
    if options.json and not options.json.resolve().parent.is_dir():
        raise PerfError(f"--json: there is no folder {options.json.resolve().parent}")


def warm(worker: Server, edits: list[Edit], options: argparse.Namespace) -> None:
    # Warm with each edit of the measurement once: this primes their templates and no others.
    count = min(len(edits), options.requests) if options.warmup is None else options.warmup
    if count:
        print(
            f"warming up with {count} edits (--warmup); a run measures {options.requests}",
            flush=True,
        )
        worker.warm([edits[i % len(edits)] for i in range(count)])


def describe(
    options: argparse.Namespace, tool: Tool, edits: list[Edit], model: str | None
) -> dict[str, Any]:
    """Return the part of the results that holds for all runs."""
    ratios = [edit.mask_ratio for edit in edits]
    return {
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": options.hardware,
        "tool": tool.version,
        "model": model or "unknown",
        "kind": options.kind,
        "references": options.references,
        "size": options.size,
        "steps": options.steps,
        "cache": options.cache,
        "progress": options.progress,
        "entries": len(edits),
        "templates": len({edit.image for edit in edits}),
        "mask_ratio": {
            "distribution": options.mix,
            "mean": round(float(np.mean(ratios)), 4),
            "p50": round(float(np.median(ratios)), 4),
            "max": round(max(ratios), 4),
        },
        "seed": options.seed,
    }
