"""In which of an edit's steps its controls act."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Ranged(Protocol):
    """What says when a control acts."""

    @property
    def scale(self) -> float: ...

    @property
    def start(self) -> float: ...

    @property
    def end(self) -> float: ...


class Named(Ranged, Protocol):
    """The same of a ControlNet."""

    @property
    def name(self) -> str: ...


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


def shares(controls: Sequence[Named], steps: int) -> tuple[tuple[str, float], ...]:
    """Of those that act, the name and the share of the steps in which it does."""
    found = (
        (each.name, sum(bool(scale_at(each, step, steps)) for step in range(steps)) / steps)
        for each in controls
    )
    return tuple([each for each in found if each[1]])
