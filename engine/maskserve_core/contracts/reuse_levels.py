"""Levels of fidelity that an edit which would be late may step down to (`reuse: elastic`).

What each was measured at is that of the demo models, in 12 steps (2-core AMD EPYC, CPU only,
2026-11-22; docs/benchmarks/quality-frontier-fill.json and -inpaint.json, which a test holds the
table to):

    scripts/bench eval_quality --frontier
"""

from __future__ import annotations

from typing import NamedTuple

from maskserve_core.contracts.settings import EditSettings
from maskserve_core.models.facts import ModelFacts


class ReuseLevel(NamedTuple):
    """A way of leaving work out."""

    name: str
    """Of the system in the tables."""
    first_block_threshold: float
    psnr: float
    """dB in the mask, against our dense edit; the mean over edits."""
    work: float
    """Its FLOPs, as a share of the edit's without."""


_FILL = (
    ReuseLevel("kv-int4-one-ring1-skip0.1", 0.1, 37.73, 0.415),
    ReuseLevel("kv-int4-one-ring1-skip0.2", 0.2, 33.11, 0.252),
)
_FILL_DENSE = (
    ReuseLevel("first_block_cache-0.1", 0.1, 39.63, 0.386),
    ReuseLevel("first_block_cache-0.2", 0.2, 32.12, 0.222),
)
_INPAINT = (
    ReuseLevel("kv-int4-stride3-ring1-skip0.1", 0.1, 29.89, 0.509),
    ReuseLevel("kv-int4-stride3-ring1-skip0.2", 0.2, 27.27, 0.304),
)
_INPAINT_DENSE = (
    ReuseLevel("first_block_cache-0.1", 0.1, 31.55, 0.509),
    ReuseLevel("first_block_cache-0.2", 0.2, 26.98, 0.345),
)
LEVELS = {
    ("fill", True): _FILL,
    ("fill", False): _FILL_DENSE,
    ("inpaint", True): _INPAINT,
    ("inpaint", False): _INPAINT_DENSE,
}
"""By semantics, and whether the edit is cached; the nearest to the edit without first."""


def levels_of(settings: EditSettings, facts: ModelFacts, *, cached: bool) -> tuple[ReuseLevel, ...]:
    """Those that the edit may step down to, the nearest first; none unless it asked for any."""
    if settings.reuse != "elastic" or not facts.skips_steps:
        return ()
    floor, begin = settings.reuse_floor or 0.0, settings.first_block_threshold or 0.0
    return tuple(
        level
        for level in LEVELS[facts.semantics, cached]
        if level.psnr >= floor and level.first_block_threshold > begin
    )
