"""Do harm to a real worker and measure what its clients see and how soon it is back.

    python scripts/bench measure_faults --json docs/benchmarks/faults.json
    python scripts/bench measure_faults --show docs/benchmarks/faults.json

Starts a worker, then for each fault: five long edits (three gRPC, one HTTP, one stream), the
fault, the clients' answers, the restart, the next edit that is done. At last the supervisor itself
is killed and started again. And, in a full batch, each way for a client to leave.

Exit code 1 when an answer came too late or named another reason, when a worker needed more than
its load time and 15 s, or when a row went on for over two steps.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from concurrent import futures
from pathlib import Path
from typing import Any

from maskserve_harness.checkout import DEMO_MODEL
from maskserve_harness.faults.bars import missed_bars
from maskserve_harness.faults.client_faults import (
    client_faults,
    full_batch,
    try_client_fault,
)
from maskserve_harness.faults.repository import sabotaged_repository
from maskserve_harness.faults.site import Site
from maskserve_harness.faults.supervisor_faults import FAULT, try_supervisor_kill
from maskserve_harness.faults.table import client_table, worker_table
from maskserve_harness.faults.worker_faults import try_worker_fault, worker_faults
from maskserve_harness.machine import machine
from maskserve_serving.errors import ServeError
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.show:
        report = json.loads(args.show.read_text(encoding="utf-8"))
    else:
        try:
            report = measure(args)
        # A future's own is another than the builtin before Python 3.11.
        except (ServeError, TimeoutError, futures.TimeoutError) as error:
            print(f"measure_faults: {error}", file=sys.stderr)
            return 1
    print(worker_table(report["worker_faults"]), client_table(report["client_faults"]), sep="\n\n")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    missed = missed_bars(report)
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if missed else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="folder in diffusers format")
    parser.add_argument("--side", type=int, default=128, help="pixels of the square source")
    parser.add_argument("--steps", type=int, default=200, help="denoising steps of a long edit")
    parser.add_argument("--only", default="", help="only faults whose names match this expression")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--show", type=Path, help="print the tables of a figures file; no run")
    return parser.parse_args(argv)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = ServeOptions(
            model=str(args.model),
            base_port=free_base_port(),
            log_dir=folder / "logs",
            repositories=sabotaged_repository(folder),
        )
        with Supervisor(options) as supervisor:
            site = Site(supervisor.workers[0], args.side, args.steps)
            rows = site.worker.config.engine.max_rows
            left = []
            for leaving in client_faults():
                if re.search(args.only, leaving.name):
                    with full_batch(site, rows - 1):
                        left.append(try_client_fault(site, leaving).to_json())
                    print(left[-1], flush=True)
            harm = []
            for fault in worker_faults():
                if re.search(args.only, fault.name):
                    harm.append(try_worker_fault(site, fault).to_json())
                    print(harm[-1], flush=True)
        if re.search(args.only, FAULT):
            logs = folder / "killed"
            harm.append(try_supervisor_kill(str(args.model), logs, args.side, args.steps).to_json())
            print(harm[-1], flush=True)
    return {
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": machine(),
        "model": args.model.name,
        "steps": args.steps,
        "rows": rows,
        "worker_faults": harm,
        "client_faults": left,
    }
