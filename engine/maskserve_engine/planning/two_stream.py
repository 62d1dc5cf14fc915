"""The exact times at which a plan's blocks run and its loads arrive, in one step or in many.

Two streams, two clocks: `F`, when the load stream is done with everything up to this block, and
`t`, when the compute stream is. For a block with fixed work g before it, load l and compute c:

    F1 = max(F, (t + g) - head_start)    the stream waits while it is a budget ahead
    F' = max(F1 + l, t' - head_start)
    t' = max(F1 + l, t + g) + c          the block waits for its entry

The host is a third clock: it launches the step's kernels one after the other, ahead of the device
where it can. So a step takes at least as long as launching all of its kernels.

Without `head_start` this is the recursion of FlashPS Algorithm 1. `head_start` bounds the loads for
blocks that have not begun, so a plan that computes first and loads later pays for it. The lead of a
step is t - F at its start: the loads that the slack of the step before has already done.

The recursion only adds and takes maxima, so a whole step is one 2x2 matrix over (max, +), and
steps repeated with one plan settle at its eigenvalue: the steady seconds per step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from maskserve_common.line_fit import Line
from maskserve_engine.planning.cost_model import CostModel
from maskserve_engine.planning.entry_bytes import end_bytes
from maskserve_engine.planning.flops import DENSE, KINDS, KV, Floats, ModelWork, Totals

NO_RESTORE = -1.0
"""Value in `StepCosts.ends` where nothing needs the block's output of cached tokens."""


@dataclass(frozen=True)
class StepCosts:
    """Costs of one step of all cached rows together, in seconds: finite and at least 0. A load of
    `inf` means that there is no entry.

    Args:
        compute: `[blocks, 3]`, columns as in KINDS.
        loads: `[blocks, 2]`: loading the `h` and the `kv` entries of the block's input.
        before: `[blocks]`: fixed compute right before a block (convolutions, dense rows).
        after: fixed compute after the last block.
        ends: `[blocks]`: loading the block's cached output where a stack ends and needs it,
            NO_RESTORE elsewhere.
        head_start: how far loads may run ahead of the block being computed, in seconds of loading;
            the byte budget of the prefetch buffers times the seconds per byte. `inf`: no bound.
        launching: `[blocks, 3]`: host seconds for launching the block's kernels.
        launching_fixed: host seconds for launching the kernels outside the blocks.
    """

    compute: Floats
    loads: Floats
    before: Floats
    after: float = 0.0
    ends: Floats = field(default_factory=lambda: np.zeros(0))
    head_start: float = math.inf
    launching: Floats = field(default_factory=lambda: np.zeros((0, len(KINDS))))
    launching_fixed: float = 0.0

    def __post_init__(self) -> None:
        n = len(self.compute)
        if not len(self.launching):
            object.__setattr__(self, "launching", np.zeros((n, len(KINDS))))
        if not len(self.ends):
            object.__setattr__(self, "ends", np.full(n, NO_RESTORE))
        shapes = {"compute": (n, len(KINDS)), "loads": (n, 2), "before": (n,), "ends": (n,)}
        shapes["launching"] = shapes["compute"]
        for name, shape in shapes.items():
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name}: shape {getattr(self, name).shape}; accepted: {shape}")
        if not n or not (np.isfinite(self.compute).all() and self.compute.min() >= 0):
            raise ValueError("compute: must be finite, at least 0 and not empty")
        if not (np.isfinite(self.before).all() and self.before.min() >= 0 <= self.after):
            raise ValueError("before, after: must be finite and at least 0")
        if not self.loads.min() >= 0 or np.isnan(self.ends).any() or not self.head_start >= 0:
            raise ValueError("loads, ends, head_start: must be at least 0, and not NaN")
        if not (np.isfinite(self.launching).all() and self.launching.min() >= 0):
            raise ValueError("launching: must be finite and at least 0")

    def host(self, kinds: Sequence[int]) -> float:
        """Return the seconds in which the host launches all kernels of a step."""
        blocks = self.launching[np.arange(len(kinds)), list(kinds)]
        return float(blocks.sum()) + self.launching_fixed


def step_costs(
    work: ModelWork,
    totals: Totals,
    model: CostModel,
    load_bytes: Mapping[str, Floats],
    *,
    end_loads: Mapping[str, Floats] | None = None,
    budget_bytes: float = math.inf,
    dense: Totals | None = None,
) -> StepCosts:
    """Return the costs of a step from counted work and a cost model.

    Args:
        work: the model at the image's size.
        totals: sums over the cached rows.
        model: cost model of the worker.
        load_bytes: per tier, `block_bytes` of the rows whose entries lie there; 0 for parts that
            have arrived, `inf` for parts that are not kept. One transfer per tier and block is
            assumed.
        end_loads: per tier, the bytes of the entry that restores each stack's cached output;
            None: as many as `h` of the stack's last block.
        budget_bytes: bytes that may be loaded ahead of their block.
        dense: sums over the dense rows of the same step; they run beside the plan and give the
            load stream their time.

    Raises:
        ValueError: the cost model has no numbers for a tier.
    """
    per_flop = model.compute.per_unit
    compute = work.block_flops(totals) * per_flop
    fixed = work.fixed_flops(totals) * per_flop
    fixed_before = np.zeros(len(work.blocks))
    if dense is not None:
        fixed_before += work.block_flops(dense)[:, 0] * per_flop
        fixed = fixed + work.fixed_flops(dense, dense=True) * per_flop
    fixed_before[work.starts] += fixed[:-1]
    fixed_before[0] += model.compute.fixed
    loads = np.zeros((len(work.blocks), 2))
    ends = np.full(len(work.blocks), NO_RESTORE)
    restores, size = np.zeros(len(work.ends)), 0.0
    for tier, moved in load_bytes.items():
        if tier not in model.loads:
            raise ValueError(f"tier: {tier!r} has no numbers; known: {', '.join(model.loads)}")
        line = model.loads[tier]
        loads += _seconds(line, moved)
        restored = end_bytes(work, moved) if end_loads is None else end_loads[tier]
        restores += _seconds(line, restored)
        size += float(moved[np.isfinite(moved[:, 1]), 1].sum())
    if work.restore_ends:
        ends[work.ends] = restores
    # Bytes become seconds at this step's own mean rate, so that a budget holds fewer seconds of
    # a slow tier's loads than of none, whatever mixture of tiers the rows lie on.
    seconds = float(loads[np.isfinite(loads[:, 1]), 1].sum())
    ahead = budget_bytes * seconds / size if size and seconds else math.inf
    calls = totals.alone + totals.together
    launching = calls * work.launches * model.launch
    # Dense rows are in the call that the others share.
    calls = totals.alone + (totals.together or dense is not None)
    launching_fixed = calls * work.fixed_launches * model.launch
    return StepCosts(
        compute, loads, fixed_before, float(fixed[-1]), ends, ahead, launching, launching_fixed
    )


def _seconds(line: Line, moved: Floats) -> Floats:
    """Return the seconds of each transfer; 0 bytes take none, and infinite bytes never arrive."""
    is_finite = np.isfinite(moved)
    seconds = line.fixed + line.per_unit * np.where(is_finite, moved, 0.0)
    return np.where(is_finite, np.where(moved > 0, seconds, 0.0), math.inf)


INF = math.inf
LOADS = ("none", "h", "kv")


class Item(NamedTuple):
    """A block, or a stack's end as a block that is `dense` at no cost: only its load counts."""

    before: float
    h: float
    kv: float
    dense: float
    project: float
    cached: float
    block: int
    """-1 at a stack's end."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How the cached rows of a step run each block, and the seconds that this takes."""

    kinds: tuple[str, ...]
    """Kind of each block, of KINDS."""
    loads: tuple[str, ...]
    """Load of each block, of LOADS. A `project` block loads nothing where cached hidden states are
    present: after a dense block or at the start of a stack."""
    restores: tuple[int, ...]
    """Dense blocks whose hidden states of cached tokens were not kept and are loaded (`h`)."""
    end_restores: tuple[int, ...]
    """Blocks at the end of a stack whose output of cached tokens is loaded."""
    compute: float
    load: float
    host: float
    """Host seconds for launching the step's kernels."""
    latency: float
    """Seconds of one step: from the given lead, or repeated for ever if none was given; at least
    `host`.
    """
    lead: float
    """Seconds of loads done before the step begins; at most the whole step's."""
    bound: float = 0.0
    """Lower bound of any plan's latency, proved by the planner; 0 without a search."""

    @property
    def stall(self) -> float:
        return max(0.0, self.latency - max(self.compute, self.host))


def items_of(costs: StepCosts) -> list[Item]:
    """Return the step as plain floats, in order."""
    items: list[Item] = []
    rows = zip(
        costs.before.tolist(),
        costs.loads.tolist(),
        costs.compute.tolist(),
        costs.ends.tolist(),
        strict=True,
    )
    for i, (fixed, (h, kv), (dense, project, cached), end) in enumerate(rows):
        items.append(Item(fixed, h, kv, dense, project, cached, i))
        if end >= 0:
            items.append(Item(0.0, end, INF, 0.0, 0.0, 0.0, -1))
    return items


def head_start_of(costs: StepCosts) -> float:
    """Return a finite `head_start`: beyond the whole step's seconds more changes nothing."""
    ends = costs.ends[(costs.ends < INF) & (costs.ends > 0)]
    loads = costs.loads[costs.loads < INF].sum() + ends.sum()
    whole = float(costs.compute.sum() + costs.before.sum() + loads) + costs.after
    return min(costs.head_start, whole)


def actions(items: Sequence[Item], kinds: Sequence[int]) -> list[tuple[float, float, float]]:
    """Return `(before, load, compute)` of every item when block i runs as `kinds[i]` (index in
    KINDS).

    Hidden states of cached tokens are present at the start, after dense blocks and after stack
    ends.
    """
    steps, present = [], True
    for item in items:
        kind = DENSE if item.block < 0 else kinds[item.block]
        load = item.kv if kind == KV else 0.0 if present else item.h
        present = kind == DENSE
        steps.append((item.before, load, item[3 + kind]))
    return steps


def run(
    steps: Sequence[tuple[float, float, float]], after: float, head_start: float, lead: float
) -> tuple[float, float]:
    """Return `(F, t)` at the end of a step that starts at t = 0 with `lead` seconds of loads
    done.
    """
    f, t = -min(lead, head_start), 0.0
    for fixed, load, compute in steps:
        t += fixed
        f = max(f, t - head_start) + load
        t = max(f, t) + compute
        f = max(f, t - head_start)
    t += after
    return max(f, t - head_start), t


def period(
    steps: Sequence[tuple[float, float, float]], after: float, head_start: float
) -> tuple[float, float]:
    """Return `(seconds per step, lead)` of a plan repeated for ever."""
    # Far below every other time, standing for "does not depend on this clock".
    never = -1e9
    ff, tf = _column(steps, after, head_start, 0.0, never)
    ft, tt = _column(steps, after, head_start, never, 0.0)
    rate = max(ff, tt, (ft + tf) / 2)
    lead = tf - rate if rate == ff > tt else rate - ft
    return rate, min(max(lead, 0.0), head_start)


def _column(
    steps: Sequence[tuple[float, float, float]], after: float, head_start: float, f: float, t: float
) -> tuple[float, float]:
    for fixed, load, compute in steps:
        t += fixed
        x = t - head_start
        f = (f if f > x else x) + load
        t = (f if f > t else t) + compute
        x = t - head_start
        f = f if f > x else x
    t += after
    return max(f, t - head_start), t


def evaluate(
    costs: StepCosts, kinds: Sequence[str], *, lead: float | None = None, bound: float = 0.0
) -> Plan:
    """Return the plan that runs block i as `kinds[i]`.

    Args:
        costs: costs of the step.
        kinds: one of KINDS per block.
        lead: loading done before the step begins; `None`: the steady state.
        bound: passed on to the plan.

    Raises:
        ValueError: another number of kinds than blocks.
    """
    if len(kinds) != len(costs.compute):
        raise ValueError(f"kinds: {len(kinds)} for {len(costs.compute)} blocks")
    return plan_of(costs, items_of(costs), [KINDS.index(k) for k in kinds], lead, bound)


def plan_of(
    costs: StepCosts,
    items: Sequence[Item],
    kinds: Sequence[int],
    lead: float | None,
    bound: float,
) -> Plan:
    """Evaluate a plan as `evaluate` does, from the planner's items."""
    steps, ahead = actions(items, kinds), head_start_of(costs)
    load = sum(s[1] for s in steps)
    if lead is None:
        latency, start_lead = period(steps, costs.after, ahead)
        start_lead = min(start_lead, load)
    else:
        start_lead = min(lead, ahead)
        _, latency = run(steps, costs.after, ahead, start_lead)
    host = costs.host(kinds)
    latency = max(latency, host)
    names, restores, ends, present = [], [], [], True
    for i, item in enumerate(items):
        kind = DENSE if item.block < 0 else kinds[item.block]
        from_h = not present and kind != KV
        if item.block >= 0:
            names.append(LOADS[2 if kind == KV else int(from_h)])
            if from_h and kind == DENSE:
                restores.append(item.block)
        elif from_h:
            ends.append(items[i - 1].block)
        present = kind == DENSE
    return Plan(
        kinds=tuple(KINDS[k] for k in kinds),
        loads=tuple(names),
        restores=tuple(restores),
        end_restores=tuple(ends),
        compute=sum(s[0] + s[2] for s in steps) + costs.after,
        load=load,
        host=host,
        latency=latency,
        lead=start_lead,
        bound=bound,
    )
