"""What steps took, booked when the device has done them: no step waits for the one before."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from maskserve_core.worker.observations import Observations
from maskserve_engine.cache.loader import Loader
from maskserve_engine.device_clock import Span
from maskserve_engine.measured_costs import MeasuredCosts
from maskserve_engine.requests.templates import Priming


class TakenStep(NamedTuple):
    """A step that the device was asked for."""

    span: Span
    stalls: tuple[Span, ...]
    """Of it, where it waited for entries."""
    flops: float | None
    """None: its rows have done less than is counted."""
    predicted: float | None
    """Seconds that its plan expected; None: it read no entries."""
    rows: int
    primings: tuple[Priming, ...]
    """Templates of its priming rows."""


class StepTimes:
    """Tells counters, histograms, the cost model and primings what steps took.

    Args:
        costs: follow what is measured.
        loader: whose moves they follow, too; None: nothing is loaded.
        counters: of the worker.
        observations: of the worker.
    """

    def __init__(
        self,
        costs: MeasuredCosts,
        loader: Loader | None,
        counters: dict[str, float],
        observations: Observations,
    ) -> None:
        self._costs, self._loader = costs, loader
        self._counters, self._observations = counters, observations
        self._open: deque[TakenStep] = deque()

    def add(self, step: TakenStep) -> None:
        self._counters["steps_total"] += 1
        self._open.append(step)
        self.book()

    def book(self) -> None:
        """Book the steps that are done by now."""
        while self._open:
            step = self._open[0]
            seconds, stalls = step.span.seconds(), [stall.seconds() for stall in step.stalls]
            if seconds is None:
                return
            self._open.popleft()
            self._book(step, seconds, sum(stall or 0.0 for stall in stalls))

    def _book(self, step: TakenStep, seconds: float, stall: float) -> None:
        self._counters["step_seconds_total"] += seconds
        self._observations.add("step_seconds", seconds)
        if step.predicted is not None:
            self._counters["step_load_stall_seconds_total"] += stall
            self._observations.add("step_load_stall_seconds", stall)
        for priming in step.primings:
            priming.seconds += seconds / step.rows
        if step.flops is None:
            return
        self._costs.step(step.flops, seconds - stall)
        if self._loader is not None:
            self._costs.moves(self._loader.take_moves())
        if step.predicted is not None:
            error = abs(seconds - step.predicted) / max(seconds, 1e-9)
            self._observations.add("step_prediction_error", error)
