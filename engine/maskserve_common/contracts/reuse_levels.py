"""Levels of fidelity to which a late edit may step down (`reuse: elastic`).

The measured values are those of the demo models, in 12 steps (2-core AMD EPYC, CPU only, 2026-11-25
Fill, 2026-11-22 Inpaint, refresh steps 2026-11-27; docs/benchmarks/quality-frontier-*.json and
quality-own-*.json). Tests compare the tables with these files; in them no other ring saves more per
dB.

    scripts/bench eval_quality --frontier
    scripts/bench eval_quality --own
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

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
    first_block_threshold: float
    psnr: float
    """dB in the mask, against our dense edit; the mean over edits."""
    work: float
    """FLOPs, as a share of those of the same edit that computes its text in every step."""
    refresh_steps: int = 0
    """Refresh steps, evenly over the edit's steps; 0: as many as the edit has."""


RING = 1
"""Ring of the edits that levels with another ring were measured against."""
_FILL = (
    ReuseLevel("kv-int4-one-ring3-skip0.05", 3, 0.05, 43.24, 0.725),
    ReuseLevel("kv-int4-one-ring3-skip0.1", 3, 0.1, 39.33, 0.481),
    ReuseLevel("kv-int4-one-ring2-skip0.1", 2, 0.1, 38.63, 0.441),
    ReuseLevel("kv-int4-one-ring1-skip0.1", None, 0.1, 37.73, 0.415),
    ReuseLevel("kv-int4-one-ring1-skip0.2", None, 0.2, 33.11, 0.251),
    ReuseLevel("kv-int4-one-ring0-skip0.2", 0, 0.2, 32.59, 0.236),
    ReuseLevel("kv-int4-one-ring0-skip0.3", 0, 0.3, 29.4, 0.166),
)
_FILL_DENSE = (
    ReuseLevel("first_block_cache-0.05", None, 0.05, 49.37, 0.626),
    ReuseLevel("first_block_cache-0.1", None, 0.1, 39.63, 0.386),
    ReuseLevel("first_block_cache-0.2", None, 0.2, 32.12, 0.222),
    ReuseLevel("first_block_cache-0.3", None, 0.3, 28.71, 0.175),
)
_FILL_REFRESH = (
    ReuseLevel("{0,8} foreseen, int8, ring left out", None, 0.0, 47.92, 0.821, refresh_steps=2),
    ReuseLevel("{0}, int8, ring left out", None, 0.0, 33.68, 0.642, refresh_steps=1),
)
_INPAINT_REFRESH = (ReuseLevel("{0,3,9} foreseen, int8", None, 0.0, 41.35, 0.859, refresh_steps=3),)
_INPAINT = (
    ReuseLevel("kv-int4-stride3-ring1-skip0.1", None, 0.1, 29.89, 0.509),
    ReuseLevel("kv-int4-stride3-ring1-skip0.2", None, 0.2, 27.27, 0.304),
)
_INPAINT_DENSE = (
    ReuseLevel("first_block_cache-0.1", None, 0.1, 31.55, 0.509),
    ReuseLevel("first_block_cache-0.2", None, 0.2, 26.98, 0.345),
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
    settings: EditSettings, skipping: str, plan: Execution, refresh_steps: int = 0
) -> tuple[ReuseLevel, ...]:
    """Return the levels to which the edit may step down, the nearest first; none unless it asks for
    them.

    An edit with LoRAs or ControlNets, or with a ring of its own choice, keeps its ring.

    Args:
        settings: settings of the edit, with its ring.
        skipping: `ModelSpec.skipping` of the model.
        plan: execution plan of the edit.
        refresh_steps: number of its refresh steps, if any.
    """
    if settings.reuse != "elastic":
        return ()
    floor, own_threshold = settings.reuse_floor or 0.0, settings.first_block_threshold or 0.0
    may_change_ring = settings.mask_ring == RING and not settings.loras and not settings.controls
    return tuple(
        level
        for level in _BY_NAME.get((skipping, plan), ())
        if level.psnr >= floor
        and (level.first_block_threshold > own_threshold or 0 < level.refresh_steps < refresh_steps)
        and (may_change_ring or level.ring is None)
    )


def with_template(levels: Iterable[ReuseLevel], times: float) -> tuple[ReuseLevel, ...]:
    """Return the levels of an edit that reads a template, with `work` as a share of this edit's;
    levels that are more work are left out.

    Args:
        levels: measured levels. Their `work` is a share of that of an edit that computes text and
            ring in every step.
        times: work of such an edit, as a multiple of this edit's.
    """
    scaled = (level._replace(work=times * level.work) for level in levels)
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
