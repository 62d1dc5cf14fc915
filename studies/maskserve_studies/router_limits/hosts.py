"""Estimate the cost of each part of a deployment with 8, 64 and 1,000 GPUs.

    python scripts/bench scale --json docs/benchmarks/scale.json

FLUX.1 Fill on H100s by their published rates, the public mix of masks, 80 % of the workers'
capacity. Up to 64 workers are behind one name with its routers; larger deployments repeat that, and
clients are assigned by their key (docs/deploy.md). Templates that are not in a host's memory come
from shared storage, as fast as from a disk of the host. Workers and fetches are simulated; the time
of a decision and of reading a record is measured on one core, with the router's own code.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import msgspec

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.emulator.worker import EmulatedWorker
from maskserve_benchmarks.machine import machine
from maskserve_benchmarks.simulator.capacity import at_load
from maskserve_benchmarks.simulator.cluster import Cluster
from maskserve_benchmarks.simulator.hardware import Hardware
from maskserve_benchmarks.simulator.result import measure
from maskserve_benchmarks.simulator.scenario import Scenario, Tiers
from maskserve_benchmarks.simulator.workload import Workload, draw
from maskserve_common.contracts.status_record import RowStatus
from maskserve_router.config import RouterConfig
from maskserve_router.workers.worker import read_status

GPUS = (8, 64, 1000)
GROUP = 64
"""Workers behind one name."""
LOAD = 0.8
_EDITS_PER_WORKER = 60
_WORKERS_PER_HOST = 8
_HOST_TEMPLATES = 160
"""FLUX templates that fit the host memory of eight workers, 120 GiB."""
_PICTURE_MB = 1.5
_BUSY = 0.5
"""Share of a core that one router gets."""
_RECORDS = 2000
_STATUS = {"op": "status"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    options = parser.parse_args()
    record = _record()
    rows = [costs(gpus, record) for gpus in GPUS]
    report = {
        "command": " ".join(["python", *sys.argv]),
        "hardware": machine(),
        "date": date.today().isoformat(),
        "record_bytes": len(record),
        "rows": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print("| |" + "".join(f" {gpus:,} GPUs |" for gpus in GPUS))
    print("|---|" + "---:|" * len(GPUS))
    for name in rows[0]:
        print(f"| {name} |" + "".join(f" {row[name]:,} |" for row in rows))
    return 0


def costs(gpus: int, record: bytes) -> dict[str, float]:
    """Return named figures of a deployment of `gpus` GPUs."""
    groups = math.ceil(gpus / GROUP)
    workers = math.ceil(gpus / groups)
    hardware = Hardware()
    workload = Workload(_EDITS_PER_WORKER * workers, 1.0)
    tiers = Tiers(_WORKERS_PER_HOST, _HOST_TEMPLATES, workload.templates)
    scenario = at_load(Scenario(workload, workers=workers, tiers=tiers), hardware, LOAD)
    requests = draw(scenario.workload, hardware.tokens, 1)
    cluster = _Timed(scenario, hardware, 1)
    cluster.run(requests)
    result = measure(cluster, requests, 1)
    duration_s = max(job.ended for job in cluster.jobs)
    rate = scenario.workload.rate * gpus / workers
    decision_s = statistics.median(cluster.decision_times)
    router_figures = json.loads((CHECKOUT / "docs" / "benchmarks" / "router.json").read_text())
    request_s = 1 / router_figures["requests_per_s"]["router"]
    poll_s = _seconds_to_read(record)
    polls = workers / RouterConfig().workers.poll_interval_s  # polls per second of one router
    poll_cores = polls * poll_s  # cores for polling, independent of the edits
    edits = rate / groups * (request_s + decision_s)
    routers = max(2, math.ceil(edits / max(_BUSY - poll_cores, 0.05)))
    fetched_bytes = result.fetches * hardware.template_bytes / duration_s * groups
    return {
        "names, each with its routers": groups,
        "edits/s at 80 % load": round(rate, 1),
        "mean latency of an edit, s": round(result.mean, 2),
        "P95 of an edit, s": round(result.p95, 2),
        "rows per step": round(result.batch, 2),
        "host to device, GB/s per worker": round(
            result.loaded_gib * 2**30 / 1e9 / duration_s / workers, 2
        ),
        "router: a decision, ms": round(1e3 * decision_s, 2),
        "router: cores for edits": round(edits * groups, 2),
        "router: cores for polls, each": round(poll_cores, 3),
        "routers": routers * groups,
        "records read, MB/s": round(polls * routers * groups * len(record) / 1e6, 1),
        "pictures in and out, Gbit/s": round(rate * 2 * _PICTURE_MB * 8 / 1e3, 2),
        "templates, GiB on object storage": round(
            scenario.workload.templates * hardware.template_bytes / 2**30
        ),
        "read from storage, GB/s": round(fetched_bytes / 1e9, 2),
        "host memory for entries, GiB": round(
            math.ceil(gpus / _WORKERS_PER_HOST) * _HOST_TEMPLATES * hardware.template_bytes / 2**30
        ),
    }


class _Timed(Cluster):
    """A cluster that records how long the routing of each edit takes on this machine."""

    decision_times: list[float]

    def run(self, requests: Any) -> None:
        self.decision_times = []
        super().run(requests)

    def _arrive(self, now: float, request: object) -> None:
        begin = time.perf_counter()
        super()._arrive(now, request)
        self.decision_times.append(time.perf_counter() - begin)


def _record() -> bytes:
    """Return a worker's status as `control` sends it: eight rows, eight waiting edits, 160
    templates.
    """

    async def status() -> Any:
        templates = tuple(f"{n:032x}" for n in range(_HOST_TEMPLATES))
        worker = EmulatedWorker("w", None, templates=templates)
        return msgspec.json.decode(worker.control_answer(_STATUS))

    row = RowStatus(f"{0:032x}", "cached", 400, 4096, 20, f"{0:032x}")
    rows = [msgspec.to_builtins(row)] * 8
    return msgspec.json.encode({**asyncio.run(status()), "running": rows, "waiting": rows})


def _seconds_to_read(record: bytes) -> float:
    begin = time.perf_counter()
    for _ in range(_RECORDS):
        read_status(record)
    return (time.perf_counter() - begin) / _RECORDS
