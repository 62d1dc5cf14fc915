"""What an edit asks of ControlNets: how much each of its control pictures counts at each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Control:
    """A ControlNet's picture and its weight in one edit."""

    net: str
    """Which ControlNet: its version, as the engine keeps them."""
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
        """The scale of step `step` of `steps`; 0: adds nothing."""
        return scale_at(self, step, steps)


class Ranged(Protocol):
    """What says when a control acts."""

    @property
    def scale(self) -> float: ...

    @property
    def start(self) -> float: ...

    @property
    def end(self) -> float: ...


R = TypeVar("R", bound=Ranged)


def scale_at(control: Ranged, step: int, steps: int) -> float:
    """The scale of step `step` of `steps`, as diffusers' pipelines have it; 0: adds nothing."""
    outside = step / steps < control.start or (step + 1) / steps > control.end
    return 0.0 if outside else control.scale


def acting(controls: Sequence[R], steps: int) -> tuple[R, ...]:
    """Those that add something in any step. The others are as if nobody had asked for them: no
    random number is drawn for them, either, as diffusers would.
    """
    return tuple(
        each for each in controls if any(scale_at(each, step, steps) for step in range(steps))
    )
