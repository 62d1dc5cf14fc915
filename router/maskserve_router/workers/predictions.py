"""How far the router's predictions were off, of the last edits that it sent."""

from __future__ import annotations

from collections import deque
from statistics import median, quantiles

import msgspec

_LAST = 1000


class PredictionError(msgspec.Struct, frozen=True):
    """|predicted - actual| / actual seconds of an edit at its worker."""

    edits: int
    """That it was taken over."""
    median: float
    p95: float


class Predictions:
    """What was predicted when an edit was sent, against what it took."""

    def __init__(self) -> None:
        self._errors: deque[float] = deque(maxlen=_LAST)

    def add(self, predicted_s: float, actual_s: float) -> float:
        """Book an edit; its relative error."""
        error = abs(predicted_s - actual_s) / max(actual_s, 1e-9)
        self._errors.append(error)
        return error

    def error(self) -> PredictionError | None:
        """Of the last thousand edits; None before the second one."""
        if len(self._errors) < 2:
            return None
        p95 = quantiles(self._errors, n=20, method="inclusive")[-1]
        return PredictionError(len(self._errors), median(self._errors), p95)
