"""The worth of a LoRA or a ControlNet on the device: uses per byte, where old uses fade."""

from __future__ import annotations

import math
from collections import OrderedDict

HALF_LIFE = 1_000
"""Uses of all resources of a kind after which a use counts half. A longer life keeps resources that
are out of use; a shorter one forgets those used steadily but rarely (`scripts/bench
adapter_misses`).
"""
_REMEMBERED = 32_768
"""Most resources whose uses are remembered, on the device or not."""


class Popularity:
    """Uses of one kind, counted on a clock that ticks with each use of any of them."""

    def __init__(self, half_life: int = HALF_LIFE) -> None:
        self._half_life = half_life
        self._uses = 0
        self._scores: OrderedDict[str, float] = OrderedDict()
        """log2 of the uses, each worth 2^(when / half-life): fading divides all by the same, so
        what is stored never changes but by a use. The least recently used stands first."""

    def record_use(self, name: str) -> None:
        self._uses += 1
        clock = self._uses / self._half_life
        old_score = self._scores.pop(name, -math.inf)
        high, low = max(old_score, clock), min(old_score, clock)
        self._scores[name] = high + math.log2(1.0 + 2.0 ** (low - high))
        if len(self._scores) > _REMEMBERED:
            self._scores.popitem(last=False)

    def worth(self, name: str, nbytes: int) -> float:
        """Return the worth of keeping it; only worths of one moment can be compared."""
        return self._scores.get(name, -math.inf) - math.log2(max(nbytes, 1))
