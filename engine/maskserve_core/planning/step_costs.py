"""What the planner decides over: seconds of every way to run and to feed each block of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from maskserve_core.planning.cost_model import CostModel, Line
from maskserve_core.planning.entry_bytes import end_bytes
from maskserve_core.planning.flops import KINDS, Floats, ModelWork, Totals

NO_RESTORE = -1.0
"""In `StepCosts.ends`: nothing needs the block's inactive output."""


@dataclass(frozen=True)
class StepCosts:
    """Costs of one step of all cached rows together. Seconds, finite and at least 0; a load of
    `inf` says that the entry is not there.

    Args:
        compute: `[blocks, 3]`, columns as in KINDS.
        loads: `[blocks, 2]`: loading the `h` and the `kv` entries of the block's input.
        before: `[blocks]`: fixed compute right before a block (convolutions, dense rows).
        after: fixed compute after the last block.
        ends: `[blocks]`: loading the block's inactive output where a stack ends and needs it,
            NO_RESTORE elsewhere.
        ahead: how far loads may run ahead of the block being computed, in seconds of loading;
            the byte budget of the prefetch buffers times the seconds per byte. `inf`: no bound.
    """

    compute: Floats
    loads: Floats
    before: Floats
    after: float = 0.0
    ends: Floats = field(default_factory=lambda: np.zeros(0))
    ahead: float = math.inf

    def __post_init__(self) -> None:
        n = len(self.compute)
        if not len(self.ends):
            object.__setattr__(self, "ends", np.full(n, NO_RESTORE))
        shapes = {"compute": (n, len(KINDS)), "loads": (n, 2), "before": (n,), "ends": (n,)}
        for name, shape in shapes.items():
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name}: shape {getattr(self, name).shape}; accepted: {shape}")
        if not n or not (np.isfinite(self.compute).all() and self.compute.min() >= 0):
            raise ValueError("compute: must be finite, at least 0 and not empty")
        if not (np.isfinite(self.before).all() and self.before.min() >= 0 <= self.after):
            raise ValueError("before, after: must be finite and at least 0")
        if not self.loads.min() >= 0 or np.isnan(self.ends).any() or not self.ahead >= 0:
            raise ValueError("loads, ends, ahead: must be at least 0, and not NaN")


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
    """Costs of a step from counted work and a cost model.

    Args:
        work: the model at the image's size.
        totals: sums over the cached rows.
        model: of the worker.
        load_bytes: per tier, what `block_bytes` gives for the rows whose entries lie there; 0 for
            what has arrived, `inf` for what was not kept. One transfer per tier and block is
            assumed.
        end_loads: per tier, the bytes of the entry that restores each stack's inactive output;
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
    before = np.zeros(len(work.blocks))
    if dense is not None:
        before += work.block_flops(dense)[:, 0] * per_flop
        fixed = fixed + work.fixed_flops(dense, dense=True) * per_flop
    before[work.starts] += fixed[:-1]
    before[0] += model.compute.fixed
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
    return StepCosts(compute, loads, before, float(fixed[-1]), ends, ahead)


def _seconds(line: Line, moved: Floats) -> Floats:
    """Of one transfer each; nothing takes no time, what is not there never comes."""
    there = np.isfinite(moved)
    seconds = line.fixed + line.per_unit * np.where(there, moved, 0.0)
    return np.where(there, np.where(moved > 0, seconds, 0.0), math.inf)
