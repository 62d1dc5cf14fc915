"""The largest rate of a worker, by which a load is a share of it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from maskserve_benchmarks.simulator.cluster import Cluster
from maskserve_benchmarks.simulator.hardware import Hardware
from maskserve_benchmarks.simulator.scenario import Scenario
from maskserve_benchmarks.simulator.workload import Workload, draw

_EDITS = 600
_SEED = 1


def capacity(hardware: Hardware, workload: Workload, max_rows: int = 8) -> float:
    """Return edits per second of one worker that never waits for work, with every template in
    memory.

    600 edits of the workload's mix arrive at once. The rate counts from the 60th to the 540th
    finished edit, so that the batch is full throughout.
    """
    return _capacity(hardware, workload.mix, workload.steps, workload.controlled, max_rows)


@cache
def _capacity(
    hardware: Hardware, mix: str, steps: tuple[int, ...], controlled: float, max_rows: int
) -> float:
    workload = Workload(_EDITS, 1e9, mix, steps, controlled=controlled)
    cluster = Cluster(Scenario(workload, workers=1, max_rows=max_rows), hardware)
    cluster.run(draw(workload, hardware.tokens, _SEED))
    ends = sorted(job.ended for job in cluster.jobs)
    low, high = _EDITS // 10, _EDITS - _EDITS // 10
    return (high - low) / (ends[high] - ends[low])


def at_load(scenario: Scenario, hardware: Hardware, load: float) -> Scenario:
    """Return the scenario with arrivals at `load` (1 = saturated) times the capacity of its
    workers.
    """
    worker_rate = capacity(hardware, scenario.workload, scenario.max_rows)
    return replace(
        scenario, workload=replace(scenario.workload, rate=load * scenario.workers * worker_rate)
    )
