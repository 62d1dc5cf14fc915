"""A row's own walk through the sigmas of flow matching."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Walk(NamedTuple):
    """One step in plain numbers, each exactly a float32."""

    timestep: float
    """0 to 1000, what the model is told."""
    sigma: float
    change: float
    """Of sigma, to the next step: negative."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Flow-matching Euler steps of one row."""

    sigmas: Tensor
    """[n + 1] float32, the last one 0."""
    walk: tuple[Walk, ...]

    @property
    def steps(self) -> int:
        return len(self.walk)
