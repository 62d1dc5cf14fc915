"""Figures of a run, and checks that nothing is lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from maskserve_benchmarks.simulator.cluster import Cluster
from maskserve_benchmarks.simulator.hardware import Hardware
from maskserve_benchmarks.simulator.job import Job
from maskserve_benchmarks.simulator.scenario import Scenario
from maskserve_benchmarks.simulator.workload import Request, draw


@dataclass(frozen=True, slots=True)
class Result:
    """Figures of one run, over the edits after the warm-up; times are seconds, rates edits per
    second.
    """

    seed: int
    policy: str
    edits: int
    measured: int
    done: int
    expired: int
    refused: int
    mean: float
    p50: float
    p95: float
    p99: float
    goodput: float
    """Edits per second that finished within the service level."""
    good_share: float
    utilisation: float
    """Mean over workers of the share of time, until the last arrival, in which a worker
    computes."""
    batch: float
    """Rows per step."""
    loaded_gib: float
    """GiB loaded from hosts' memories to devices."""
    fetches: int
    """Number of templates fetched from disks."""
    misses: int
    """Edits that could have run cached if their worker had held their template."""
    primed: int
    prediction_error: float
    """Median of |predicted - actual| / actual seconds from sending to the last step."""
    lora_loads: int
    """Number of loads from hosts' memories and from the storage to devices."""
    interruptions_p50: float
    """Strawman: pre- and post-processing of other edits during an edit's denoising."""
    interruptions_p95: float

    def to_json(self) -> dict[str, float | int | str]:
        return asdict(self)


class NotConserved(RuntimeError):
    """A run lost, duplicated or invented work."""


def run(scenario: Scenario, hardware: Hardware, seed: int) -> tuple[Result, Cluster]:
    """Draw, run, check and measure.

    Raises:
        NotConserved: the simulator has a fault.
    """
    requests = draw(scenario.workload, hardware.tokens, seed)
    cluster = Cluster(scenario, hardware, seed)
    cluster.run(requests)
    check_conserved(cluster, requests)
    return measure(cluster, requests, seed), cluster


def simulate(scenario: Scenario, hardware: Hardware, seed: int) -> Result:
    """Return the figures of `run`."""
    return run(scenario, hardware, seed)[0]


def check_conserved(cluster: Cluster, requests: Sequence[Request]) -> None:
    """Check that each edit ends exactly once, and that the work done is the work requested.

    The worker itself checks at each step that it is not over capacity.
    """

    def must(holds: bool, rule: str) -> None:
        if not holds:
            raise NotConserved(rule)

    ended = sorted([j.request.number for j in cluster.jobs] + [r.number for r in cluster.refused])
    must(ended == [r.number for r in requests], "each edit is sent or refused, once")
    must(cluster.answers == len(cluster.jobs), "each edit sent is answered, once")
    for job in cluster.jobs:
        job_tokens = job.request.steps * job.row.tokens
        must(job.outcome in ("done", "expired"), f"edit {job.request.number} has an outcome")
        must(job.sent == job.request.arrival, "an edit is sent when it arrives")
        if job.outcome == "done":
            must(job.tokens_done == job_tokens, f"edit {job.request.number} got the work it asked")
            must(job.sent <= job.started < job.denoised <= job.ended, "time runs forward")
        else:
            must(job.tokens_done < job_tokens, f"edit {job.request.number} expired unfinished")
    steps = sum(job.request.steps - job.left for job in cluster.jobs)
    row_steps = sum(worker.row_steps for worker in cluster.workers.values())
    must(steps == row_steps, f"rows took {row_steps} steps, edits got {steps}")
    primed = sum(worker.prime_steps for worker in cluster.workers.values())
    planned = sum(worker.primed for worker in cluster.workers.values()) * cluster.hardware.anchors
    must(primed == planned, f"priming took {primed} steps of {planned}")


def measure(cluster: Cluster, requests: Sequence[Request], seed: int) -> Result:
    scenario = cluster.scenario
    first_number = int(scenario.warmup * len(requests))
    jobs = [j for j in cluster.jobs if j.request.number >= first_number]
    done_jobs = [j for j in jobs if j.outcome == "done"]
    latencies = np.array([j.ended - j.request.arrival for j in done_jobs] or [math.nan])
    good = sum(
        j.ended - j.request.arrival <= scenario.slo * _lone_seconds(scenario, cluster.hardware, j)
        for j in done_jobs
    )
    window = requests[-1].arrival - requests[first_number].arrival
    workers = cluster.workers.values()
    steps = sum(w.steps for w in workers)
    errors = [abs(j.predicted - (j.denoised - j.sent)) / (j.denoised - j.sent) for j in done_jobs]
    interruptions = _interruptions(done_jobs) if scenario.batching == "strawman" else [0]
    return Result(
        seed=seed,
        policy=scenario.policy,
        edits=len(requests),
        measured=len(jobs),
        done=len(done_jobs),
        expired=sum(j.outcome == "expired" for j in jobs),
        refused=len(cluster.refused),
        mean=float(latencies.mean()),
        p50=float(np.percentile(latencies, 50)),
        p95=float(np.percentile(latencies, 95)),
        p99=float(np.percentile(latencies, 99)),
        goodput=good / window if window else math.nan,
        good_share=good / len(jobs) if jobs else math.nan,
        utilisation=_busy(cluster, requests[-1].arrival),
        batch=sum(w.row_steps + w.prime_steps for w in workers) / steps if steps else 0.0,
        loaded_gib=sum(w.loaded_bytes for w in workers) / 2**30,
        fetches=sum(host.fetches for host in cluster.hosts),
        misses=sum(w.misses for w in workers),
        primed=sum(w.primed for w in workers),
        prediction_error=float(np.median(errors)) if errors else math.nan,
        lora_loads=sum(sum(w.loras.loads.values()) for w in workers if w.loras),
        interruptions_p50=float(np.percentile(interruptions, 50)),
        interruptions_p95=float(np.percentile(interruptions, 95)),
    )


def _lone_seconds(scenario: Scenario, hardware: Hardware, job: Job) -> float:
    """Return the seconds that the edit takes on an idle worker that holds its template."""
    active = job.request.active
    cached = hardware.cacheable(active)
    step = hardware.step_seconds(1, active, 0) if cached else hardware.step_seconds(0, 0, 1)
    return scenario.pre_seconds + job.request.steps * step + scenario.post_seconds


def _busy(cluster: Cluster, until: float) -> float:
    total = sum(
        min(end, until) - start
        for worker in cluster.workers.values()
        for start, end in worker.intervals
        if start < until
    )
    return total / (until * len(cluster.workers)) if until else math.nan


def _interruptions(jobs: list[Job]) -> list[int]:
    """Return for each edit how many others were admitted or finished on its worker while it
    denoised.
    """
    counts = []
    for worker in {job.worker for job in jobs}:
        worker_jobs = [job for job in jobs if job.worker == worker]
        moments = np.sort([t for job in worker_jobs for t in (job.started, job.denoised)])
        for job in worker_jobs:
            low, high = np.searchsorted(moments, (job.started, job.denoised), side="right")
            counts.append(int(high - low) - 1)  # the edit's own end does not count
    return counts
