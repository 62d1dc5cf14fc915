"""Costs of steps and loads on this worker, first an estimate, then fitted to measurements; and the
prices of rows at these costs, for routers.

A step's seconds are recorded when the device has done it. A step waits for the one before the last.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from maskserve_common.config import Config
from maskserve_common.contracts.pricing import DegreePrice, Pricing
from maskserve_common.line_fit import Line, fit
from maskserve_common.observations import Observations
from maskserve_engine.base.device_clock import Span
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.families.specs import control_work
from maskserve_engine.fitting.entry_store import entry_format
from maskserve_engine.planning.cost_model import CostModel
from maskserve_engine.requests.state import Priming, RequestState
from maskserve_engine.scheduling.policies import policy_of
from maskserve_engine.spec.control_nets import ControlNets
from maskserve_engine.spec.estimate import pricing_of
from maskserve_engine.spec.model_spec import net_shares, refresh_rule, text_shares

_WINDOW = 512
_EVERY = 32
"""Samples between two fits."""
_HOST_BOUND = 1.2
MOST_QUEUED = 1
"""Most steps that the device has not done when the next one is decided. The host launches a step
while the device does the one before, so the device waits only for steps that take the host longer.
"""
_VARIED = 0.1
"""Coefficient of variation below which a line through the samples has no usable slope."""


class MeasuredCosts:
    """A cost model that follows what was measured.

    Args:
        model: initial cost model.
    """

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self.sequence = 0
        """Number of fits; plans made for an earlier one are stale."""
        self._steps = _Samples()
        self._moves: defaultdict[str, _Samples] = defaultdict(_Samples)

    def step_seconds(self, edit: RequestState) -> tuple[tuple[float, ...], float]:
        """Return the seconds of an edit's step on one device, and their part that does not depend
        on the step's rows.
        """
        line = self.model.compute
        return (line.seconds(edit.flops),), line.fixed

    def step(self, flops: float, seconds: float, host: float = 0.0) -> None:
        """Record a step, without its waits for loads.

        Args:
            flops: FLOPs of the step.
            seconds: seconds on the device.
            host: seconds to launch its kernels. A step that took hardly longer says nothing of
                FLOPs.
        """
        if seconds <= _HOST_BOUND * host:
            return
        if self._steps.add(flops, seconds):
            line = self._steps.line(self.model.compute)
            self.model = replace(self.model, compute=line, source="measured")
            self.sequence += 1

    def moves(self, moved: Iterable[tuple[str, float, float]]) -> None:
        """Account for moves: (tier, bytes, seconds) each."""
        for tier, size, seconds in moved:
            samples = self._moves[tier]
            if samples.add(size, seconds):
                line = samples.line(self.model.loads.get(tier, Line(0.0, 1e-10)))
                self.model = replace(self.model, loads={**self.model.loads, tier: line})
                self.sequence += 1


class PriceList:
    """Prices of rows of the model's native size.

    Args:
        costs: costs of this worker; prices follow them.
        degrees: returns the gains of edits on several devices, given the text tokens of a prompt;
            None: edits have one device.
    """

    def __init__(
        self,
        config: Config,
        adapter: Adapter,
        costs: MeasuredCosts,
        anchors: int,
        degrees: Callable[[int], tuple[DegreePrice, ...]] | None = None,
    ) -> None:
        self._costs, spec = costs, adapter.spec
        self._degrees = degrees if policy_of(config.engine).gangs else None
        self._text = spec.text_tokens(config.model.max_sequence_length)
        nets = [net for net in ControlNets(config, spec).all() if not net.problem]
        side = spec.native_resolution // spec.vae_scale_factor
        work = adapter.work(side, side)
        steps = spec.steps_default(config.model.num_inference_steps)
        shared = policy_of(config.engine).shares_steps
        self._priced = partial(
            pricing_of,
            work,
            fmt=entry_format(config),
            text=self._text,
            anchors=anchors,
            steps_per_anchor=steps / anchors,
            halves=adapter.entry_halves,
            controls={net.name: control_work(spec, net.config, side, side) for net in nets},
            lora=work.typical_lora() if config.adapters.store else None,
            net_shares=net_shares(config, spec, steps),
            text_shares=text_shares(config, spec, steps, shared=shared),
            leaves_ring=refresh_rule(config, spec).ring,
        )
        self._priced_at, self._pricing = costs.sequence, self._price()

    @property
    def pricing(self) -> Pricing:
        """Prices at the worker's present costs."""
        if self._priced_at != self._costs.sequence:
            self._priced_at, self._pricing = self._costs.sequence, self._price()
        return self._pricing

    def _price(self) -> Pricing:
        pricing = self._priced(self._costs.model)
        if self._degrees is None:
            return pricing
        return replace(pricing, degrees=self._degrees(self._text))

    def measured(self) -> Pricing | None:
        """Prices at measured costs; None while costs are an estimate."""
        return self.pricing if self._costs.model.source == "measured" else None


class _Samples:
    """The latest (x, seconds)."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._new = 0

    def add(self, x: float, seconds: float) -> bool:
        """Add a sample; return whether it is time to fit again."""
        self._samples.append((x, seconds))
        self._new += 1
        if self._new < _EVERY:
            return False
        self._new = 0
        return True

    def line(self, before: Line) -> Line:
        """Return the line through the samples; if all are of about one x, the line so far, scaled.

        Only the faster half of the samples of about one x counts: what else the machine does makes
        a step longer, never shorter.

        Args:
            before: the line so far.
        """
        x, seconds = np.array(self._samples).T
        buckets = np.round(np.log2(np.maximum(x, 1.0)) * 16)
        undisturbed = np.zeros(len(x), dtype=bool)
        for bucket in np.unique(buckets):
            in_bucket = buckets == bucket
            undisturbed |= in_bucket & (seconds <= np.median(seconds[in_bucket]))
        x, seconds = x[undisturbed], seconds[undisturbed]
        if x.std() > _VARIED * x.mean() and len(x) > 2:
            return fit(x.tolist(), seconds.tolist())
        scale = float(seconds.mean()) / max(before.seconds(float(x.mean())), 1e-12)
        return Line(before.fixed * scale, before.per_unit * scale)


class QueuedStep(NamedTuple):
    """A step that was queued on the device."""

    span: Span
    stalls: tuple[Span, ...]
    """Spans of the step in which it waited for entries."""
    flops: float | None
    """FLOPs of each rank that took it; None: its rows have done less than is counted."""
    predicted: float | None
    """Seconds that its plan expected; None: it read no entries."""
    rows: int
    primings: tuple[Priming, ...]
    """Templates of its priming rows."""
    host: float = 0.0
    """Counted seconds in which the host launched its kernels."""
    overhead_s: float = 0.0
    """Counted seconds beside an even share of the FLOPs among its ranks
    (`DegreeTimes.overhead_shares`).
    """


class StepTimes:
    """Reports the times of steps to counters, histograms, the cost model and primings.

    Args:
        costs: costs that follow the measurements.
        moves: returns the moves since its last call, which `costs` follows too.
    """

    def __init__(
        self,
        costs: MeasuredCosts,
        moves: Callable[[], Iterable[tuple[str, float, float]]],
        counters: dict[str, float],
        observations: Observations,
    ) -> None:
        self._costs, self._moves = costs, moves
        self._counters, self._observations = counters, observations
        self._open: deque[QueuedStep] = deque()

    def add(self, step: QueuedStep) -> None:
        self._counters["steps_total"] += 1
        self._open.append(step)
        self.book()

    def keep_pace(self) -> None:
        """Wait until the device has done all steps but the last MOST_QUEUED, and record them."""
        while len(self._open) > MOST_QUEUED:
            self._open[0].span.wait()
            self.book()

    def book(self) -> None:
        """Record the steps that the device has done."""
        while self._open:
            step = self._open[0]
            seconds, stalls = step.span.seconds(), [stall.seconds() for stall in step.stalls]
            if seconds is None:
                return
            self._open.popleft()
            self._book(step, seconds, sum(stall or 0.0 for stall in stalls))

    def _book(self, step: QueuedStep, seconds: float, stall: float) -> None:
        self._counters["step_seconds_total"] += seconds
        self._observations.add("step_seconds", seconds)
        if step.predicted is not None:
            self._counters["step_load_stall_seconds_total"] += stall
            self._observations.add("step_load_stall_seconds", stall)
        for priming in step.primings:
            priming.seconds += seconds / step.rows
        if step.flops is None:
            return
        self._costs.step(step.flops, seconds - stall - step.overhead_s, step.host)
        self._costs.moves(self._moves())
        if step.predicted is not None:
            error = abs(seconds - step.predicted) / max(seconds, 1e-9)
            self._observations.add("step_prediction_error", error)
