"""The path of an edit through Triton against the same parts called one after the other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from maskserve_benchmarks.edits.direct import Edit
from maskserve_benchmarks.machine import stolen_s
from maskserve_common.config import cores
from maskserve_common.contracts.meta import STAGES

T = TypeVar("T")
Meta = dict[str, Any]


def timed(call: Callable[..., T], *args: Any) -> tuple[float, T]:
    """Return the milliseconds of a call, and its result."""
    begin = time.perf_counter()
    returned = call(*args)
    return 1e3 * (time.perf_counter() - begin), returned


class Round(NamedTuple):
    """Milliseconds of one edit, run once through Triton and once directly."""

    through: float
    """Time through Triton."""
    straight: float
    """Time of direct calls to the same parts."""
    stages: float
    """Part of `through` that the models report in META."""
    stolen: float
    """Time that the host gave to other work, summed over the processors."""


def measure_path(
    serve: Callable[[Edit], Meta], call: Callable[[Edit], Any], edits: list[Edit], count: int
) -> dict[str, Any]:
    """Time both ways in turn; the way that goes first alternates.

    Args:
        serve: takes an edit through Triton and returns its META.
        call: calls the same parts directly.
        edits: the edits, taken in turn.
        count: number of rounds.
    """
    rounds = []
    for number in range(count + 2):
        edit, stolen = edits[number % len(edits)], stolen_s()
        if number % 2:
            (through, meta), (straight, _) = timed(serve, edit), timed(call, edit)
        else:
            (straight, _), (through, meta) = timed(call, edit), timed(serve, edit)
        stages = sum(meta["timings_ms"][stage] for stage in STAGES)
        rounds.append(Round(through, straight, stages, 1e3 * (stolen_s() - stolen)))
    del rounds[:2]  # warm-up
    total_ms = sum(sample.through + sample.straight for sample in rounds)
    calm = sorted(rounds, key=lambda sample: sample.stolen)[: max(1, count // 4)]
    return {
        "rounds": count,
        "stolen_share": round(sum(sample.stolen for sample in rounds) / total_ms / cores(), 4),
        **_medians(rounds),
        "calmest_quarter": {
            "most_stolen_ms": round(calm[-1].stolen, 1),
            **_medians(calm),
        },
    }


def _medians(rounds: list[Round]) -> dict[str, Any]:
    def median(figure: Callable[[Round], float]) -> float:
        return round(statistics.median(map(figure, rounds)), 2)

    through, straight = median(lambda r: r.through), median(lambda r: r.straight)
    return {
        "triton_p50_ms": through,
        "direct_p50_ms": straight,
        "added_p50_ms": round(through - straight, 2),
        "added_p50_ci95_ms": _interval(rounds),
        "added_median_of_pairs_ms": median(lambda r: r.through - r.straight),
        "outside_stages_p50_ms": median(lambda r: r.through - r.stages),
    }


def _interval(rounds: list[Round]) -> list[float]:
    """Return the 95 % confidence interval of the difference of medians (bootstrap)."""
    pairs = np.array([(sample.through, sample.straight) for sample in rounds])
    resamples = np.random.default_rng(0).integers(0, len(rounds), (2000, len(rounds)))
    added = np.subtract(*np.moveaxis(np.median(pairs[resamples], axis=1), 1, 0))
    return [round(float(end), 2) for end in np.percentile(added, (2.5, 97.5))]
