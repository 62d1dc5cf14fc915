"""Plans kept by quantised totals: a row set that barely changed need not be planned again."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence

from maskserve_core.planning.flops import Totals
from maskserve_core.planning.planner import TOLERANCE, plan
from maskserve_core.planning.step_costs import StepCosts
from maskserve_core.planning.two_stream import Plan

_INTERVALS = 2
"""The step loop waits for a plan: rather a few per cent than some hundred milliseconds."""


def plan_totals(
    cached: Totals, tier_tokens: Mapping[str, float], dense: Totals | None = None
) -> tuple[float, ...]:
    """What a plan depends on for one model, image size, cost model and budget.

    Args:
        cached: sums over the cached rows.
        tier_tokens: inactive tokens to load per tier, summed over the rows and in a fixed order.
        dense: sums over the dense rows of the step.
    """
    beside = (float(dense.rows), dense.text) if dense is not None else (0.0, 0.0)
    return (float(cached.rows), cached.text, *cached.active, *tier_tokens.values(), *beside)


class PlanCache:
    """Steady plans by quantised totals, the least recently used dropped first.

    A plan stays valid for any totals, since kinds hold for every row; between totals of one
    bucket it is only not quite the best. Its predicted seconds are those of the totals it was
    made for, at most one quantum off per total.

    Not safe for threads: the scheduler's thread alone asks.
    """

    def __init__(
        self, capacity: int = 4096, steps_per_octave: int = 16, tolerance: float = TOLERANCE
    ) -> None:
        """A cache of `capacity` plans; totals within 2^(1/steps_per_octave) of one another may
        share one (16: 4.4 %).
        """
        if capacity < 1 or steps_per_octave < 1:
            raise ValueError("capacity, steps_per_octave: must be at least 1")
        self.capacity = capacity
        self.steps = steps_per_octave
        self.tolerance = tolerance
        self.hits = 0
        self.misses = 0
        self._plans: OrderedDict[Hashable, Plan] = OrderedDict()

    def __len__(self) -> int:
        return len(self._plans)

    def get(
        self,
        what: Hashable,
        totals: Sequence[float],
        build: Callable[[], StepCosts],
        lead: float | None = None,
    ) -> Plan:
        """The plan for `totals`.

        Args:
            what: everything else the costs depend on (model, size, cost model's sequence number,
                budget, format, what has arrived), compared as it is.
            totals: finite numbers of at least 0, as `plan_totals` gives them.
            build: makes the costs; called on a miss alone.
            lead: as in `plan`; None: the same step repeated.
        """
        steps, log2 = self.steps, math.log2
        key = (what, lead, *(round(log2(x) * steps) if x > 0 else None for x in totals))
        found = self._plans.get(key)
        if found is not None:
            self.hits += 1
            self._plans.move_to_end(key)
            return found
        self.misses += 1
        made = plan(build(), lead=lead, tolerance=self.tolerance, intervals=_INTERVALS)
        self._plans[key] = made
        if len(self._plans) > self.capacity:
            self._plans.popitem(last=False)
        return made
