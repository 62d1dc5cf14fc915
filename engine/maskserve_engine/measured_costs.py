"""What steps and loads cost on this worker: an estimate at first, refined as it runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from maskserve_core.planning.cost_model import CostModel, Line, fit

_WINDOW = 512
_EVERY = 32
"""Samples between two fits."""
_VARIED = 0.1
"""Below this coefficient of variation a line through the samples has no slope to speak of."""


class MeasuredCosts:
    """A cost model that follows what was measured.

    Args:
        model: to begin with.
    """

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self.sequence = 0
        """Grows with every fit: plans made for another one are stale."""
        self._steps = _Samples()
        self._moves: dict[str, _Samples] = {}

    def step(self, flops: float, seconds: float) -> None:
        """A step of so many FLOPs took so long, waiting for loads apart."""
        if self._steps.add(flops, seconds):
            line = self._steps.line(self.model.compute)
            self.model = replace(self.model, compute=line, source="measured")
            self.sequence += 1

    def moves(self, moved: Iterable[tuple[str, float, float]]) -> None:
        """Parts travelled: (tier, bytes, seconds) each."""
        for tier, size, seconds in moved:
            samples = self._moves.setdefault(tier, _Samples())
            if samples.add(size, seconds):
                line = samples.line(self.model.loads.get(tier, Line(0.0, 1e-10)))
                self.model = replace(self.model, loads={**self.model.loads, tier: line})
                self.sequence += 1


class _Samples:
    """The latest (x, seconds)."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._new = 0

    def add(self, x: float, seconds: float) -> bool:
        """Whether it is time to fit again."""
        self._kept.append((x, seconds))
        self._new += 1
        if self._new < _EVERY:
            return False
        self._new = 0
        return True

    def line(self, before: Line) -> Line:
        """Through the samples; if all are alike, the line so far, scaled.

        Of samples that are alike in x the lower half counts: what else the machine does makes a
        step longer, never shorter.
        """
        x, seconds = np.array(self._kept).T
        alike = np.round(np.log2(np.maximum(x, 1.0)) * 16)
        fair = np.zeros(len(x), dtype=bool)
        for each in np.unique(alike):
            of_it = alike == each
            fair |= of_it & (seconds <= np.median(seconds[of_it]))
        x, seconds = x[fair], seconds[fair]
        if x.std() > _VARIED * x.mean() and len(x) > 2:
            return fit(x.tolist(), seconds.tolist())
        scale = float(seconds.mean()) / max(before.seconds(float(x.mean())), 1e-12)
        return Line(before.fixed * scale, before.per_unit * scale)
