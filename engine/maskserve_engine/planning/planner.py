"""Which blocks of a step run dense, project K and V from `h`, or take them ready (`kv`).

FlashPS Algorithm 1 walks the blocks once and keeps the cheaper of two choices at each. This planner
is exact over unequal blocks and three kinds. It walks the blocks, too, but keeps every pair of
clocks (load stream, compute stream) that no other pair beats on both, separately for cached tokens'
hidden states present and absent: later blocks only add and take maxima of the clocks, so a pair
that is beaten stays beaten. Lower bounds on the costs of the rest of the step, from Lagrangian
weights on the two clocks, cut the pairs that can no longer win.

Two questions are answered:

- one step from a known lead: minimise the step's end;
- the same step repeated: minimise the steady seconds per step. A plan is steady at rate r if for
  some lead x it ends by r with its load stream done by r - x. For an interval of leads, starting
  with the largest and asking for the smallest at the end bounds every plan from below; intervals
  are halved until the bound meets the best plan found.

Both are answered as if the device never waited for the host. Where launching the kernels of the
plan takes the host longer than that, plans with fewer kernels are tried, too.

Plans are kept by quantised totals: a row set that barely changed need not be planned again.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from maskserve_engine.planning.flops import DENSE, KV, PROJECT, Totals
from maskserve_engine.planning.plan_bounds import Sort, best_counts, best_weight, sorts_of
from maskserve_engine.planning.two_stream import (
    INF,
    Plan,
    StepCosts,
    actions,
    head_start_of,
    items_of,
    period,
    plan_of,
    run,
)

TOLERANCE = 1e-3
"""Share of the optimum a served plan may give away; costs are not known that well."""
_ROUNDING = 1e-12


def plan(
    costs: StepCosts,
    *,
    lead: float | None = None,
    tolerance: float = TOLERANCE,
    intervals: int = 200,
) -> Plan:
    """Return the best plan.

    Args:
        costs: costs of the step.
        lead: seconds of loads done before the step begins; `None` plans for the same step
            repeated (the steady state of a row set that stays).
        tolerance: a plan within this share of the optimum will do; 0 finds the optimum (to 1e-9).
        intervals: most intervals of leads that a steady search looks at.

    Returns:
        A plan whose `bound` proves it: `latency <= (1 + tolerance) * bound`, unless the
        intervals ran out, or the host bounds the step; then `bound` says how far off the plan may
        be. No plan of one kind for all blocks is faster.
    """

    def searched(costs: StepCosts) -> tuple[_Search, list[int], float]:
        search = _Search(costs)
        if lead is None:
            return search, *search.steady(tolerance, intervals)
        return search, *search.step(lead, tolerance)

    search, kinds, bound = searched(costs)
    best = plan_of(costs, search.items, kinds, lead, bound)
    if not best.host or best.host < best.latency:
        return best
    slowed = replace(costs, compute=np.maximum(costs.compute, costs.launching))
    alternatives = [searched(slowed)[1], *search.plain]
    plans = [plan_of(costs, search.items, candidate, lead, bound) for candidate in alternatives]
    return min([best, *plans], key=lambda plan: plan.latency)


class _Candidate(NamedTuple):
    value: float
    kinds: list[int]


class _Search:
    """One planning problem, with the data that its searches share."""

    def __init__(self, costs: StepCosts) -> None:
        self.items = items_of(costs)
        self.after = costs.after
        self.head_start = head_start_of(costs)
        self.fixed = float(costs.before.sum()) + costs.after
        self.least = self.fixed + float(costs.compute.min(axis=1).sum())
        n = len(costs.compute)
        self.plain = [[kind] * n for kind in (KV, PROJECT, DENSE)]
        self.sorts: list[Sort] = []

    def step(self, lead: float, tolerance: float) -> tuple[list[int], float]:
        """Return `(kinds, lower bound)` of one step from `lead`."""
        lead, goal = min(lead, self.head_start), 1 + tolerance
        best = _Candidate(INF, [])
        for kinds in self.plain:
            best = _least(best, self._timed(kinds, lead))
        if best.value <= self.least * goal:
            return best.kinds, self.least
        self.sorts = sorts_of(self.items)
        counts = best_counts(self.items, self.sorts, self.fixed, tolerance)
        for kinds in counts.plans if counts is not None else ():
            best = _least(best, self._timed(kinds, lead))
        explored = self._explore(lead, 0.0, self.head_start, best.value / goal)
        if explored is None:
            return best.kinds, best.value / goal
        return explored.kinds, explored.value

    def steady(self, tolerance: float, intervals: int) -> tuple[list[int], float]:
        """Return `(kinds, lower bound)` of the step repeated."""
        goal = 1 + max(tolerance, 1e-9)
        best = self._rated(self.plain[0])
        if best.value <= self.least * goal:
            return best.kinds, self.least
        self.sorts = sorts_of(self.items)
        counts = best_counts(self.items, self.sorts, self.fixed, tolerance)
        if counts is not None:
            for kinds in counts.plans:
                best = _least(best, self._rated(kinds))
                if best.value <= counts.bound * goal:
                    return best.kinds, counts.bound
        for kinds in self.plain[1:]:
            best = _least(best, self._rated(kinds))
        # Streams that never wait for one another: max(all loads, all compute) of the best plan.
        far = 2 * (self.head_start + best.value)
        free = self._explore(far, far, 2 * far, best.value / goal)
        if free is None:
            return best.kinds, best.value / goal
        best = _least(best, self._rated(free.kinds))
        return self._halve(best, free.value, goal, intervals)

    def _halve(
        self, best: _Candidate, bound: float, goal: float, looks: int
    ) -> tuple[list[int], float]:
        """Halve intervals of leads until no interval's bound is below the best plan."""
        # (bound, smallest lead, largest lead); the loosest bound is looked at first.
        intervals = [(bound, 0.0, self.head_start)]
        for _ in range(looks):
            if not intervals or best.value <= intervals[0][0] * goal:
                break
            _, low, high = heappop(intervals)
            middle = (low + high) / 2
            # Steady at the middle's lead: a plan. From the best start to the worst end: a bound.
            tried = self._explore(middle, middle, self.head_start, best.value / goal)
            if tried is not None:
                best = _least(best, self._rated(tried.kinds))
            floor = self._explore(high, low, self.head_start, best.value / goal)
            if floor is None:
                continue
            best = _least(best, self._rated(floor.kinds))
            if floor.value < best.value / goal:
                heappush(intervals, (floor.value, low, middle))
                heappush(intervals, (floor.value, middle, high))
        return best.kinds, min([best.value / goal, *(i[0] for i in intervals)])

    def _timed(self, kinds: list[int], lead: float) -> _Candidate:
        return _Candidate(
            run(actions(self.items, kinds), self.after, self.head_start, lead)[1], kinds
        )

    def _rated(self, kinds: list[int]) -> _Candidate:
        return _Candidate(period(actions(self.items, kinds), self.after, self.head_start)[0], kinds)

    def _explore(
        self, lead: float, offset: float, head_start: float, below: float
    ) -> _Candidate | None:
        """Return the plan with the least max(t, F + offset) at its end, from (F, t) = (-lead, 0).

        Returns:
            `None` if no plan's value is below `below`.
        """
        weight = best_weight(self.sorts, self.fixed, offset - lead)
        compute_weight = 1 - weight
        ceiling = below * (1 - _ROUNDING)
        weighted = self._remaining_costs(weight, offset)
        if weighted[0][1] - weight * lead >= ceiling:
            return None
        compute_alone = self._remaining_costs(0.0, offset)
        loads_alone = self._remaining_costs(1.0, offset)
        # States are (loads' clock F, computation's clock t, state before, kind of the block), by
        # whether the cached tokens' hidden states are present. This loop takes most of the time of
        # a plan, so it calls nothing, and the three kinds are written out.
        present: list[Any] = [(-lead, 0.0, None, 0)]
        absent: list[Any] = []
        for n, item in enumerate(self.items):
            fixed, h, kv, dense, project, cached, block = item
            # What each clock, and their weighted sum, may be at most behind this block.
            rest_absent, rest_present = weighted[n + 1]
            most_sum_absent, most_sum_present = ceiling - rest_absent, ceiling - rest_present
            rest_absent, rest_present = compute_alone[n + 1]
            most_t_absent, most_t_present = ceiling - rest_absent, ceiling - rest_present
            rest_absent, rest_present = loads_alone[n + 1]
            most_f_absent, most_f_present = ceiling - rest_absent, ceiling - rest_present
            next_present: list[Any] = []
            next_absent: list[Any] = []
            for states, load_h in ((present, 0.0), (absent, h)):
                for state in states:
                    f, t = state[0], state[1]
                    t += fixed
                    earliest = t - head_start  # loads run ahead by no more
                    if f < earliest:
                        f = earliest
                    ready = f + load_h
                    start = ready if ready > t else t
                    end = start + dense
                    earliest = end - head_start
                    loads_done = ready if ready > earliest else earliest
                    if (
                        weight * loads_done + compute_weight * end < most_sum_present
                        and end < most_t_present
                        and loads_done < most_f_present
                    ):
                        next_present.append((loads_done, end, state, 0))
                    if block < 0:
                        continue
                    end = start + project
                    earliest = end - head_start
                    loads_done = ready if ready > earliest else earliest
                    if (
                        weight * loads_done + compute_weight * end < most_sum_absent
                        and end < most_t_absent
                        and loads_done < most_f_absent
                    ):
                        next_absent.append((loads_done, end, state, 1))
                    ready = f + kv
                    end = (ready if ready > t else t) + cached
                    earliest = end - head_start
                    loads_done = ready if ready > earliest else earliest
                    if (
                        weight * loads_done + compute_weight * end < most_sum_absent
                        and end < most_t_absent
                        and loads_done < most_f_absent
                    ):
                        next_absent.append((loads_done, end, state, 2))
            present, absent = _front(next_present), _front(next_absent)
        return self._finish([*present, *absent], offset, head_start, ceiling)

    def _finish(
        self, states: list[Any], offset: float, head_start: float, ceiling: float
    ) -> _Candidate | None:
        best, value = None, ceiling
        for state in states:
            t = state[1] + self.after
            end = max(t, max(state[0], t - head_start) + offset)
            if end < value:
                best, value = state, end
        if best is None:
            return None
        kinds: list[int] = []
        for item in reversed(self.items):
            if item.block >= 0:
                kinds.append(best[3])
            best = best[2]
        return _Candidate(value, kinds[::-1])

    def _remaining_costs(self, weight: float, offset: float) -> list[tuple[float, float]]:
        """Return, per place in the step, for cached states (absent, present), a lower bound on the
        costs that the rest adds to weight * F + (1 - weight) * t, streams not waiting for one
        another.
        """
        compute_weight = 1 - weight
        absent = present = weight * offset + compute_weight * self.after
        places = [(absent, present)]
        for fixed, h, kv, dense, project, cached, block in reversed(self.items):
            d = compute_weight * (fixed + dense) + present
            load = weight * h if weight else 0.0
            if block < 0:
                absent, present = d + load, d
            else:
                p = compute_weight * (fixed + project) + absent
                k = compute_weight * (fixed + cached) + absent + (weight * kv if weight else 0.0)
                absent = min(k, min(p, d) + load)
                present = min(k, p, d)
            places.append((absent, present))
        places.reverse()
        return places


def _least(a: _Candidate, b: _Candidate) -> _Candidate:
    return b if b.value < a.value else a


def _front(states: list[Any]) -> list[Any]:
    """Return the states that no other beats on both clocks."""
    if len(states) < 2:
        return states
    states.sort(key=itemgetter(0))
    front, least = [], INF
    for state in states:
        if state[1] < least:
            least = state[1]
            front.append(state)
    return front


_INTERVALS = 2
"""The step loop waits for a plan: rather a few per cent than some hundred milliseconds."""


def plan_totals(
    cached: Totals, tier_tokens: Mapping[str, float], dense: Totals | None = None
) -> tuple[float, ...]:
    """Return the numbers that a plan depends on, for one model, image size, cost model and budget.

    Args:
        cached: sums over the cached rows.
        tier_tokens: cached tokens to load per tier, summed over the rows, in a fixed order.
        dense: sums over the dense rows of the step.
    """
    dense_terms = (float(dense.rows), dense.text) if dense is not None else (0.0, 0.0)
    loras = sum(part.added.cached for part in (cached, dense) if part and part.added)
    return (
        float(cached.rows),
        float(cached.alone),
        cached.text,
        *cached.active,
        *tier_tokens.values(),
        *dense_terms,
        loras,
    )


class PlanCache:
    """Steady plans by quantised totals, the least recently used dropped first.

    A plan stays valid for any totals, since kinds hold for every row; for other totals of its
    bucket it is only nearly the best. Its predicted seconds are those of the totals it was made
    for, at most one quantum off per total.

    Not thread-safe: only the scheduler's thread uses it.
    """

    def __init__(
        self, capacity: int = 4096, steps_per_octave: int = 16, tolerance: float = TOLERANCE
    ) -> None:
        """Make a cache of `capacity` plans; totals within 2^(1/steps_per_octave) of one another may
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
        subject: Hashable,
        totals: Sequence[float],
        build: Callable[[], StepCosts],
        lead: float | None = None,
    ) -> Plan:
        """Return the plan for `totals`.

        Args:
            subject: everything else that costs depend on (model, size, cost model's sequence
                number, budget, format, what has arrived), compared as it is.
            totals: finite numbers of at least 0, made by `plan_totals`.
            build: makes the costs; called only on a miss.
            lead: seconds of loads done before the step begins (see `plan`); None: the same step
                repeated.
        """
        steps, log2 = self.steps, math.log2
        key = (subject, lead, *(round(log2(x) * steps) if x > 0 else None for x in totals))
        cached = self._plans.get(key)
        if cached is not None:
            self.hits += 1
            self._plans.move_to_end(key)
            return cached
        self.misses += 1
        new_plan = plan(build(), lead=lead, tolerance=self.tolerance, intervals=_INTERVALS)
        self._plans[key] = new_plan
        if len(self._plans) > self.capacity:
            self._plans.popitem(last=False)
        return new_plan
