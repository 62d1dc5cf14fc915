"""A line through measured times, for costs that have a fixed part and one per unit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_LEAST_SHARE = 1e-3
"""Shortest length, as a share of the longest sample, that a relative error is measured against."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Line:
    """`seconds = fixed + per_unit * x`, both at least 0."""

    fixed: float
    """Seconds of a step or transfer of any size."""
    per_unit: float
    """Seconds per FLOP or byte."""
    r2: float | None = None
    """Share of the variance the fit explains; `None` if nothing was fitted or nothing varied."""
    samples: int = 0

    def __post_init__(self) -> None:
        for name in ("fixed", "per_unit"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: {value!r} is not a finite number of at least 0")

    def seconds(self, x: float) -> float:
        """Predicted seconds for `x` FLOPs or bytes."""
        return self.fixed + self.per_unit * x


def fit(x: Sequence[float], seconds: Sequence[float]) -> Line:
    """Least squares of relative errors over lines with no negative coefficient.

    Relative, because a plan weighs the small step of a cached row by its own time: plain least
    squares would bend the line to the long steps and miss the short ones by a fifth. With two
    coefficients the constrained optimum is the free one or lies on an edge: through the origin,
    or flat. R² is of plain errors, as in the paper's Fig. 11; it may be negative: worse than the
    mean.

    Raises:
        ValueError: fewer than two samples, unequal lengths, or values that are negative or not
            finite.
    """
    xs, ys = np.asarray(x, dtype=float), np.asarray(seconds, dtype=float)
    if xs.shape != ys.shape or xs.ndim != 1 or len(xs) < 2:
        raise ValueError(
            f"samples: got {xs.shape} and {ys.shape}; accepted: two equal rows of >= 2"
        )
    if not (
        np.isfinite(xs).all() and np.isfinite(ys).all() and (xs >= 0).all() and (ys >= 0).all()
    ):
        raise ValueError("samples: values must be finite and at least 0")
    longest = float(ys.max()) or 1.0
    weight: Floats = np.maximum(ys / longest, _LEAST_SHARE) ** -2.0
    weight = weight / weight.sum()
    x_mean, y_mean = float(weight @ xs), float(weight @ ys)
    dx, dy = xs - x_mean, ys - y_mean
    spread = float(weight @ (dx * dx))
    slope = float(weight @ (dx * dy)) / spread if spread else 0.0
    power = float(weight @ (xs * xs))
    edges = [(y_mean, 0.0), (0.0, float(weight @ (xs * ys)) / (power or 1.0))]
    free = (y_mean - slope * x_mean, slope)
    lines = edges + ([free] if min(free) >= 0 else [])

    def errors(line: tuple[float, float]) -> Floats:
        return np.square(ys - line[0] - line[1] * xs)

    best = min(lines, key=lambda line: float(weight @ errors(line)))
    total = float(((ys - ys.mean()) ** 2).sum())
    r2 = 1 - float(errors(best).sum()) / total if total else None
    return Line(*best, r2=r2, samples=len(xs))
