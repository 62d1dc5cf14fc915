"""What an edit asks of ControlNets: how much each of its control pictures counts at each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Control:
    """A ControlNet's picture and its weight in one edit."""

    net: str
    """Name of the ControlNet."""
    picture: NDArray[np.uint8]
    """[H, W, 3] at model resolution."""
    scale: float = 1.0
    """What it adds is multiplied by this."""
    start: float = 0.0
    """Share of the edit's steps before which it adds nothing."""
    end: float = 1.0
    """Share of the edit's steps behind which it adds nothing."""
    mode: int | None = None
    """Which kind of picture it is, for a union ControlNet."""
    moments: NDArray[np.float32] | None = None
    """[2C, h, w] VAE posterior of the picture: mean, log-variance; FLUX's nets are given it."""

    def scale_at(self, step: int, steps: int) -> float:
        """The scale of step `step` of `steps`, as diffusers' pipelines have it; 0: adds nothing."""
        outside = step / steps < self.start or (step + 1) / steps > self.end
        return 0.0 if outside else self.scale


def acting(controls: Sequence[Control], steps: int) -> tuple[Control, ...]:
    """Those that add something in any step. The others are as if nobody had asked for them: no
    random number is drawn for them, either, as diffusers would.
    """
    return tuple(
        each for each in controls if any(each.scale_at(step, steps) for step in range(steps))
    )
