"""Places of refresh steps that follow from a row's errors, for models without tuned places
(docs/adr/0090).

At each refresh step the row's lookahead error is known (`batch.lookahead_errors`). It grows with
about the `_ORDER`-th power of the distance between two refresh steps, so the error of the last
distance tells how long the next one may be, as in a solver with adaptive steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from maskserve_common.contracts.semantics import Semantics

_ORDER = 2.3
_FIRST = 0.2
"""Place of the first lookahead's refresh step, as a share of the whole distance."""
_FEW_STEPS, _FEW_FIDELITY = 8, 40.0
"""Most steps of an edit with references, and most dB of its promise, with which the first lookahead
goes to the last step: all steps between interpolate, and few lie there."""
_LAST = 2.5
"""How much shorter the stretch after the last refresh step has to be than one between two: keys and
values are extrapolated there, and no error sees it."""
_GROWTH = 4.0
"""Largest ratio of a distance to the one before."""
_BLENDED_GROWTH = 2.15
"""The same where the picture round the mask is as noisy as the rest. There the first steps decide
most of an edit: the first refresh step is the nearest, and distances grow more slowly."""
_INTERCEPT_DB, _SLOPE_DB = 34.4, 10.3
"""Line through the edits of demo models: dB against dense over the mean lookahead error,
`_INTERCEPT_DB` - `_SLOPE_DB` · log10(error). `scripts/bench reuse` fits it again."""
_MARGIN_DB = 2.0
"""Margin for edits under the line."""


def tolerance_of(fidelity: float) -> float:
    """Return the lookahead error up to which edits keep `fidelity` dB; 0 dB: none is too large."""
    return 10.0 ** ((_INTERCEPT_DB - _MARGIN_DB - fidelity) / _SLOPE_DB)


def fidelity_of(tolerance: float) -> float:
    """Return the dB that edits keep with lookahead errors up to `tolerance`."""
    return _INTERCEPT_DB - _MARGIN_DB - _SLOPE_DB * math.log10(tolerance)


class Remainder(NamedTuple):
    """How a row takes the steps after a refresh step."""

    refresh_steps: frozenset[int] = frozenset()
    """Refresh steps to come; those after the first are expected, and may move."""
    dense_from: int | None = None
    """Step from which all steps compute all tokens; None: none does."""
    failed: bool = False
    """Whether that is because even the nearest refresh step is too far."""


@dataclass(frozen=True, slots=True)
class RefreshControl:
    """Places a row's refresh steps by its lookahead errors."""

    tolerance: float
    """Largest lookahead error, above 0."""
    distances: tuple[float, ...]
    """Distance of each step from the end: its sigma to the power over which values interpolate."""
    first: float = _FIRST
    growth: float = _GROWTH

    @classmethod
    def of(
        cls, fidelity: float, sigmas: Sequence[float], power: float, semantics: Semantics
    ) -> RefreshControl:
        """Return the control of an edit's refresh steps.

        Args:
            fidelity: fidelity that it promises, in dB.
            sigmas: sigmas of its steps.
            power: power of sigma over which values interpolate.
            semantics: those of the model.
        """
        first, growth = _FIRST, _GROWTH
        if semantics.noisy_around:
            first, growth = 0.0, _BLENDED_GROWTH
        elif semantics.reference and len(sigmas) <= _FEW_STEPS and fidelity <= _FEW_FIDELITY:
            first = 1.0
        distances = tuple([sigma**power for sigma in sigmas])
        return cls(tolerance_of(fidelity), distances, first, growth)

    def begin(self, step: int = 0) -> Remainder:
        """Return the remainder of a row that has computed all tokens of `step` and knows no error
        yet, or none that holds any longer.
        """
        target, candidates = self.distances[step] * (1.0 - self.first), range(step + 2, self._steps)
        if not candidates:
            return self.dense_after(step)
        first = min(candidates, key=lambda n: abs(self.distances[n] - target))
        return Remainder(frozenset({first}) | self._spread(first, 1))

    @property
    def _steps(self) -> int:
        return len(self.distances)

    def after(self, before: int, step: int, error: float) -> Remainder:
        """Return the remainder of a row that has arrived at refresh step `step`.

        Args:
            before: refresh step before it.
            step: refresh step at which the row's lookahead was off by `error`.
            error: relative error, see `LookaheadErrors`.
        """
        last, rest = self._steps - 1, self.distances[step]
        scale = (self.tolerance / error) ** (1.0 / _ORDER) if error > 0.0 else self.growth
        reach = (self.distances[before] - rest) * min(scale, self.growth)
        if step == last or _LAST * rest <= reach:
            return Remainder()
        nearest = step + 2  # the step between computes the lookahead
        if nearest > last:
            return self.dense_after(step)
        if rest - self.distances[nearest] > reach:
            return self.dense_after(step)._replace(failed=True)
        count = max(1, math.ceil(rest / reach - 1.0 / _LAST))
        return Remainder(self._spread(step, count, reach))

    def dense_after(self, step: int) -> Remainder:
        """Return the remainder of a row whose steps after `step` compute all tokens."""
        return Remainder(frozenset(range(step + 1, self._steps)), step + 1)

    def _spread(self, step: int, count: int, reach: float = math.inf) -> frozenset[int]:
        """Return up to `count` refresh steps at even distances after `step`; the first is within
        `reach`.
        """
        begin, places = self.distances[step], list[int]()
        length = begin / (count + 1.0 / _LAST)
        for number in range(1, count + 1):
            candidates = [
                (abs(distance - begin + number * length), place)
                for place, distance in enumerate(self.distances)
                if place >= (places or [step])[-1] + 2 and (places or begin - distance <= reach)
            ]
            places += [min(candidates)[1]] if candidates else []
        return frozenset(places)
