"""The relative errors of the router's predictions for the last edits."""

from __future__ import annotations

from collections import deque
from statistics import median, quantiles

import msgspec

_LAST = 1000


class PredictionError(msgspec.Struct, frozen=True):
    """Relative errors |predicted - actual| / actual of the seconds of edits at their workers."""

    edits: int
    """Number of edits that the errors are taken from."""
    median: float
    p95: float


class Predictions:
    """Predicted and actual seconds of the last edits."""

    def __init__(self) -> None:
        self._errors: deque[float] = deque(maxlen=_LAST)

    def add(self, predicted_s: float, actual_s: float) -> float:
        """Record an edit and return its relative error."""
        error = abs(predicted_s - actual_s) / max(actual_s, 1e-9)
        self._errors.append(error)
        return error

    def error(self) -> PredictionError | None:
        """Return the error of the last thousand edits; None before the second edit."""
        if len(self._errors) < 2:
            return None
        p95 = quantiles(self._errors, n=20, method="inclusive")[-1]
        return PredictionError(len(self._errors), median(self._errors), p95)
