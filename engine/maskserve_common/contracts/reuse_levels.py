"""Levels of fidelity to which a late edit may step down (`reuse: elastic`).

The measured values are those of the demo models, in 12 steps (2-core AMD EPYC, CPU only,
2026-12-01, refresh steps 2026-11-27; docs/benchmarks/quality-frontier-*.json and
quality-own-*.json). Tests compare the tables with these files; in them no other ring saves more per
dB.

    scripts/bench eval_quality --frontier
    scripts/bench eval_quality --own
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from maskserve_common.contracts.request import model_steps
from maskserve_common.contracts.semantics import FILL, INPAINT, Semantics
from maskserve_common.contracts.settings import EditSettings

Execution = Literal["cached", "own", "dense"]
"""Execution plan: from a template, by refresh steps, or dense."""


class ReuseLevel(NamedTuple):
    """A way of leaving work out."""

    name: str
    """Name of the system in the tables."""
    ring: int | None
    """Margin round the mask that is computed, in tokens; None: the edit's own."""
    step_interval: int
    """`EditSettings.step_interval`."""
    psnr: float
    """dB in the mask, against our dense edit; the mean over edits."""
    work: float
    """FLOPs, as a share of those of the same edit that computes its text in every step, in
    `_MEASURED_STEPS`."""
    refresh_steps: int = 0
    """Refresh steps, evenly over the edit's steps; 0: as many as the edit has."""


_MEASURED_STEPS: Final = 12
RING = 1
"""Ring of the edits that levels with another ring were measured against."""
_FILL = (
    ReuseLevel("kv-int4-one-ring3-interval2", 3, 2, 44.72, 0.695),
    ReuseLevel("kv-int4-one-ring2-interval2", 2, 2, 43.11, 0.637),
    ReuseLevel("kv-int4-one-ring3-interval4", 3, 4, 41.64, 0.497),
    ReuseLevel("kv-int4-one-ring1-interval2", None, 2, 41.22, 0.583),
    ReuseLevel("kv-int4-one-ring2-interval4", 2, 4, 40.83, 0.455),
    ReuseLevel("kv-int4-one-ring1-interval4", None, 4, 39.93, 0.417),
    ReuseLevel("kv-int4-one-ring1-interval5", None, 5, 36.9, 0.333),
    ReuseLevel("kv-int4-one-ring0-interval5", 0, 5, 34.82, 0.305),
)
_FILL_DENSE = (
    ReuseLevel("dense-interval2", None, 2, 53.67, 0.583),
    ReuseLevel("dense-interval4", None, 4, 43.49, 0.417),
    ReuseLevel("dense-interval5", None, 5, 38.27, 0.333),
)
_FILL_REFRESH = (
    ReuseLevel("{0,8} foreseen, int8, ring left out", None, 1, 47.92, 0.821, refresh_steps=2),
    ReuseLevel("{0}, int8, ring left out", None, 1, 33.68, 0.642, refresh_steps=1),
)
_INPAINT_REFRESH = (ReuseLevel("{0,3,9} foreseen, int8", None, 1, 41.35, 0.859, refresh_steps=3),)
_INPAINT = (
    ReuseLevel("kv-int4-stride1-ring3-interval2", 3, 2, 38.58, 0.695),
    ReuseLevel("kv-int4-stride1-ring2-interval2", 2, 2, 37.69, 0.637),
    ReuseLevel("kv-int4-stride1-ring1-interval2", None, 2, 36.54, 0.583),
    ReuseLevel("kv-int4-stride1-ring3-interval3", 3, 3, 35.16, 0.497),
    ReuseLevel("kv-int4-stride1-ring2-interval3", 2, 3, 34.48, 0.455),
    ReuseLevel("kv-int4-stride1-ring1-interval3", None, 3, 33.7, 0.417),
    ReuseLevel("kv-int4-stride1-ring1-interval5", None, 5, 27.39, 0.333),
)
_INPAINT_DENSE = (
    ReuseLevel("dense-interval2", None, 2, 38.44, 0.583),
    ReuseLevel("dense-interval3", None, 3, 34.86, 0.417),
    ReuseLevel("dense-interval5", None, 5, 27.76, 0.333),
)
LEVELS: dict[tuple[Semantics, Execution], tuple[ReuseLevel, ...]] = {
    (FILL, "cached"): _FILL,
    (FILL, "own"): _FILL_REFRESH,
    (FILL, "dense"): _FILL_DENSE,
    (INPAINT, "cached"): _INPAINT,
    (INPAINT, "own"): _INPAINT_REFRESH,
    (INPAINT, "dense"): _INPAINT_DENSE,
}
"""Levels by the model's inputs and by execution plan; the nearest to the unchanged edit first.
Models without a measurement have none.
"""
_BY_NAME = {
    (semantics.name, execution): levels for (semantics, execution), levels in LEVELS.items()
}


def levels_of(
    settings: EditSettings, measured: str, plan: Execution, steps: int, refresh_steps: int = 0
) -> tuple[ReuseLevel, ...]:
    """Return the levels to which the edit may step down, the nearest first; none unless it asks for
    them.

    An edit with LoRAs or ControlNets, or with a ring of its own choice, keeps its ring; one with
    ControlNets its steps, too.

    Args:
        settings: settings of the edit, with its ring and `step_interval`.
        measured: `ModelSpec.measured_levels` of the model.
        plan: execution plan of the edit.
        steps: steps of its schedule.
        refresh_steps: number of its refresh steps, if any.
    """
    if settings.reuse != "elastic":
        return ()
    floor, interval = settings.reuse_floor or 0.0, settings.step_interval or 1
    keeps_ring = settings.mask_ring != RING or settings.loras or settings.controls
    levels = []
    for level in _BY_NAME.get((measured, plan), ()):
        if level.psnr < floor or (keeps_ring and level.ring is not None):
            continue
        if level.refresh_steps:
            levels += [level] if level.refresh_steps < refresh_steps else []
        elif not settings.controls and _takes_some_of(level.step_interval, interval):
            levels.append(_in_steps(level, steps, interval))
    return tuple(level for level in levels if level.work < 1.0)


def _takes_some_of(interval: int, before: int) -> bool:
    """Whether the model's steps at an interval are some of those at the one before."""
    return interval > before and interval % before == 0


def _in_steps(level: ReuseLevel, steps: int, interval: int) -> ReuseLevel:
    """Return a level with `work` as a share of an edit's of `steps` steps with an interval."""

    def share(count: int) -> float:
        return len(model_steps(count, level.step_interval)) / count

    ring_cost = round(level.work / share(_MEASURED_STEPS), 2)
    edit_share = len(model_steps(steps, interval)) / steps
    return level._replace(work=ring_cost * share(steps) / edit_share)


def with_template(levels: Iterable[ReuseLevel], times: float) -> tuple[ReuseLevel, ...]:
    """Return the levels of an edit that reads a template, with `work` as a share of this edit's;
    levels that are more work are left out.

    Args:
        levels: result of `levels_of`. Edits with another ring compute text and ring in every step.
        times: work of such an edit, as a multiple of this edit's.
    """
    scaled = (
        level if level.ring is None else level._replace(work=times * level.work) for level in levels
    )
    return tuple(level for level in scaled if level.work < 1.0)


_LEAST_STEPS = 4
_DENSE_DB = 100.0
"""Promise that only an edit which computes all tokens keeps."""
EXPECTED_STRIDE = 0.35
"""Stride that prices assume for an edit whose errors place its refresh steps (docs/adr/0090)."""


class RefreshStrides(NamedTuple):
    """Shares of a schedule between two refresh steps of edits that read no template; 0: they have
    none. Engine and router read them alike.
    """

    plain: float
    promised: float
    """With `reuse_floor`."""
    by_error: bool
    """Whether errors place the refresh steps of all edits; with `reuse_floor` they always do."""
    least_steps: int
    """Least number of steps of an edit whose errors place its refresh steps."""

    def count_of(self, settings: EditSettings, steps: int) -> int:
        """Return the number of refresh steps of an edit of `steps` steps; 0: it has none."""
        by_error = self.by_error or settings.promise > 0
        # Lookahead errors show neither what ControlNets change nor what the first steps lose.
        unmeasured = by_error and (settings.controls or steps < self.least_steps)
        if unmeasured or settings.promise >= _DENSE_DB:
            return 0
        return refresh_count(steps, self.promised if settings.promise else self.plain)


def refresh_count(steps: int, stride: float) -> int:
    """Return the number of refresh steps of an edit that reads no template: one for every `stride`
    of the schedule, at most half of all steps. An edit of fewer than four steps has none: one dense
    step alone predicts too little of so short a schedule.

    Args:
        steps: steps of the edit.
        stride: distance of refresh steps, as a share of the schedule; 0: none.
    """
    if not stride or steps < _LEAST_STEPS:
        return 0
    distance = max(2 + steps % 2, round(stride * steps))  # 3 for odd: else it is over half
    return math.ceil(steps / distance)
