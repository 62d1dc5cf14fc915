"""Plans for the rows of a step that read entries: which blocks they load, project or compute.

    steady    the best plan for these rows repeated for ever, from the total cost of their entries,
              divided by the steps that an entry serves; entries of later steps are loaded by it
    arrived   the best plan for one step from the parts that have arrived

The steady plan runs as long as its loads keep up. When they do not (a row has just joined, or its
next entry is late), the step uses the parts that have arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from maskserve_engine.cache.entries import PARTS
from maskserve_engine.cache.loader import Part
from maskserve_engine.loop.measured_costs import MeasuredCosts
from maskserve_engine.planning.cost_model import CostModel
from maskserve_engine.planning.flops import FeatureMap, Floats, ModelWork, Totals
from maskserve_engine.planning.planner import PlanCache, plan_totals
from maskserve_engine.planning.two_stream import Plan, StepCosts, evaluate, step_costs
from maskserve_engine.requests.executor import LoadState

CHOICES = ("here", "steady", "arrived", "fixed")
_LATE = 1.02
"""The steady plan keeps up while its step takes at most this many times its steady time."""


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """A row that reads an entry in a step, or its lookahead, as the step's plan depends on it."""

    totals: Totals
    """Totals of the row's step, on which its cost depends."""
    loads: tuple[LoadState, ...]
    """Loads of its entry, and of its step cache beside a template."""
    stays: int
    """Number of the row's steps that read this entry."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of this step, and the plan by which entries of later steps are loaded."""

    plan: Plan
    next_plan: Plan
    choice: str
    """One of CHOICES; `here`: nothing has to be loaded."""


class StepPlanner:
    """Makes the plan of each step; used by the engine's thread."""

    def __init__(self, costs: MeasuredCosts) -> None:
        self.costs = costs
        self.plans = PlanCache()

    def plan(
        self,
        work: ModelWork,
        rows: Sequence[PlannedRow],
        dense: Totals | None,
        *,
        fixed: bool = False,
        ranks: int = 1,
    ) -> StepPlan:
        """Return the plan of a step, and the plan by which entries of later steps are loaded.

        Args:
            work: work of the model at the rows' size.
            rows: rows that read entries; at least one.
            dense: totals of the rows that read none; None: there are no such rows.
            fixed: take every block's entry whatever that costs (`reproducible`).
            ranks: ranks that share the rows' tokens; each loads its own heads.
        """
        model = self.costs.model if ranks == 1 else _of_rank(self.costs.model, ranks)
        totals = Totals.sum_of(row.totals for row in rows)
        loads = {id(load): (load, row.stays) for row in rows for load in row.loads}.values()
        missing = _LoadBytes(work, [(load.tier, load.missing) for load, _ in loads])

        def present_costs() -> StepCosts:
            return missing.costs(totals, model, dense)

        if fixed:
            step_plan = evaluate(present_costs(), missing.all_loaded(), lead=0.0)
            return StepPlan(step_plan, step_plan, "fixed")
        whole = _LoadBytes(work, [(load.tier, load.sizes / stays) for load, stays in loads])
        problem = (self.costs.sequence, work.tokens, whole.key, ranks)
        steady = self.plans.get(
            problem,
            plan_totals(totals, whole.totals, dense),
            lambda: whole.costs(totals, model, dense),
        )
        if not missing.any:
            key = plan_totals(totals, {}, dense)
            return StepPlan(self.plans.get(problem, key, present_costs, 0.0), steady, "here")
        costs = present_costs()
        steady_now = evaluate(costs, steady.kinds, lead=0.0)
        if steady_now.latency <= _LATE * steady.latency:
            return StepPlan(steady_now, steady, "steady")
        key = plan_totals(totals, missing.totals, dense)
        step_plan = self.plans.get((*problem, missing.pattern), key, lambda: costs, 0.0)
        return StepPlan(step_plan, steady, "arrived")


def parts_of(plan: Plan, maps: Sequence[FeatureMap] = ()) -> list[Part]:
    """Return the parts that a plan's step reads, in order: moments of all feature maps first, then
    those of blocks and the maps between them.
    """
    ends, blocks = set(plan.end_restores), len(plan.kinds)
    parts: list[Part] = [(blocks + len(maps), "map")] if maps else []
    pending_maps = deque(
        (feature_map.block, (blocks + n, "map")) for n, feature_map in enumerate(maps)
    )
    for block, part in enumerate(plan.loads):
        while pending_maps and pending_maps[0][0] <= block:
            parts.append(pending_maps.popleft()[1])
        if part != "none":
            parts.append((block, part))
        if block in ends:
            parts.append((block, "end"))
    return parts + [part for _, part in pending_maps]


def _of_rank(model: CostModel, ranks: int) -> CostModel:
    compute = replace(model.compute, per_unit=model.compute.per_unit / ranks)
    return replace(model, compute=compute)


class _LoadBytes:
    """Bytes to load per tier, block and part, summed over the loads of a step."""

    def __init__(self, work: ModelWork, loads: Sequence[tuple[str, Floats]]) -> None:
        self._work = work
        self._tiers: dict[str, Floats] = {}
        for tier, sizes in loads:
            self._tiers[tier] = self._tiers[tier] + sizes if tier in self._tiers else sizes
        self._sum: Floats = np.sum(list(self._tiers.values()), axis=0)
        self._finite = np.isfinite(self._sum)
        self.any = bool((self._sum[self._finite] > 0).any())

    @property
    def key(self) -> bytes:
        """Which parts all loads have, as bytes."""
        return self._finite.tobytes()

    @property
    def pattern(self) -> bytes:
        """Which parts have bytes to load, as bytes."""
        return np.greater(self._sum, 0).tobytes()

    @property
    def totals(self) -> dict[str, float]:
        return {t: float(sizes[self._finite].sum()) for t, sizes in sorted(self._tiers.items())}

    def all_loaded(self) -> list[str]:
        """Return block kinds that use the kept part of every block."""
        return ["kv" if kv else "project" for kv in self._finite[: len(self._work.blocks), 1]]

    def costs(self, totals: Totals, model: CostModel, dense: Totals | None) -> StepCosts:
        work = self._work
        return step_costs(
            work,
            totals,
            model,
            {tier: self._of_blocks(sizes) for tier, sizes in self._tiers.items()},
            end_loads={
                tier: sizes[work.ends, 2] if work.restore_ends else np.zeros(len(work.ends))
                for tier, sizes in self._tiers.items()
            },
            dense=dense,
        )

    def _of_blocks(self, sizes: Floats) -> Floats:
        """Return [blocks, 2] bytes of `h` and `kv`. Feature maps count with the keys and values of
        the block behind them: rows that read any map take every block's.
        """
        blocks = len(self._work.blocks)
        block_sizes = sizes[:blocks, :2]
        if self._work.maps:
            block_sizes = block_sizes.copy()
            blocks_of_maps = [min(feature_map.block, blocks - 1) for feature_map in self._work.maps]
            np.add.at(
                block_sizes[:, 1],
                blocks_of_maps,
                sizes[blocks : blocks + len(blocks_of_maps), PARTS.index("map")],
            )
        return block_sizes
