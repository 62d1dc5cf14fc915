"""How far the host runs ahead of the device, on clocks that a test drives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from maskserve_common.observations import Observations
from maskserve_engine.base.device_clock import Span
from maskserve_engine.loop.measured_costs import MOST_QUEUED, MeasuredCosts, QueuedStep, StepTimes
from maskserve_engine.loop.status_publisher import new_counters
from maskserve_engine.planning.cost_model import H100, estimate
from tests.support.draws import fresh_rng

RECORDED_MS, UNRECORDED_MS = (7.0, 10.0), (36.0, 69.0)
"""Host milliseconds of a step (docs/gpu.md)."""
DENSE_MS, BETWEEN_MS = 114.0, 18.0


@dataclass
class Clocks:
    host_ms: float = 0.0
    device_ms: float = 0.0


@dataclass
class _Event:
    clocks: Clocks
    at_ms: float

    def query(self) -> bool:
        return self.clocks.host_ms >= self.at_ms

    def synchronize(self) -> None:
        self.clocks.host_ms = max(self.clocks.host_ms, self.at_ms)

    def elapsed_time(self, end: _Event) -> float:
        return end.at_ms - self.at_ms


def run(host_ms: list[float], device_ms: list[float], *, keeps_pace: bool) -> tuple[float, int]:
    """Return the milliseconds of steps, and how many steps the device had yet to do, at most, when
    the next one was decided.
    """
    clocks, most = Clocks(), 0
    counters: dict[str, float] = new_counters()
    times = StepTimes(MeasuredCosts(estimate(H100)), lambda: (), counters, Observations())
    ends: list[_Event] = []
    for launch, takes in zip(host_ms, device_ms, strict=True):
        most = max(most, sum(not end.query() for end in ends))
        clocks.host_ms += launch
        begin = max(clocks.device_ms, clocks.host_ms)
        clocks.device_ms = begin + takes
        ends.append(_Event(clocks, clocks.device_ms))
        span = Span(*(cast(Any, event) for event in (_Event(clocks, begin), ends[-1])))
        times.add(QueuedStep(span, (), None, None, 1, ()))
        if keeps_pace:
            times.keep_pace()
    return clocks.device_ms, most


def steps(host: tuple[float, float]) -> tuple[list[float], list[float]]:
    """Draw steps of edits with refresh steps at any place."""
    rng = fresh_rng()
    device_ms = rng.choice([DENSE_MS, BETWEEN_MS], 280, p=[3 / 28, 25 / 28])
    return rng.uniform(*host, 280).tolist(), cast(list[float], np.asarray(device_ms).tolist())


def test_recorded_steps_take_no_longer_with_one_step_queued() -> None:
    host_ms, device_ms = steps(RECORDED_MS)
    ahead_ms, ahead = run(host_ms, device_ms, keeps_pace=False)
    near_ms, near = run(host_ms, device_ms, keeps_pace=True)
    assert near_ms <= 1.01 * ahead_ms
    assert near <= MOST_QUEUED < 5 < ahead
