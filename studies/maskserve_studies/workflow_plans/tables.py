"""Tables of docs/benchmarks/workflow-inputs.md, from docs/benchmarks/workflows-simulated.json."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from maskserve_studies.workflow_plans.figures import GAINS_OF
from maskserve_studies.workflow_plans.systems import MONOLITHS

Report = dict[str, Any]

SHOWN = (
    "none",
    "whole cards",
    "by turns",
    "unseen queues",
    "whole cards, by turns",
    "whole cards, by turns, unseen queues",
    "small cards, by turns",
    "eight workflows, by turns",
)
"""Sets of assumptions in the document; the report has more."""


def rates_table(report: Report) -> str:
    """Rates: the median over the seeds, with the least and the greatest."""
    names = [*MONOLITHS, "ours", "lego_at_ours"]
    rates_by_name = report["rates"] | {"S4, masks": report["masks"]}
    lines = [
        [name, *(_spread(system_rates.get(system, ())) for system in names)]
        for name, system_rates in rates_by_name.items()
    ]
    return _table(["", *names[:-1], "lego in time at our rate"], lines)


def gains_table(report: Report) -> str:
    """Our gain over planned monoliths under each set of assumptions: the rate in times. For one
    setting also due times, bursts and devices of both systems. Medians over the seeds of
    `rates_table`.
    """
    lines = []
    for name in SHOWN:
        results = report["assumed"][name]
        rates = [
            _median(
                [
                    o / p if p else None
                    for o, p in zip(system_rates["ours"], system_rates["planned"], strict=True)
                ]
            )
            for system_rates in results["rates"].values()
        ]
        pairs = []
        for figure in ("due", "cv", "devices"):
            columns = [
                [item[figure][system] for item in results[GAINS_OF]]
                for system in ("planned", "ours")
            ]
            pairs.append(" / ".join(_median(item, ".3g") for item in columns))
        lines.append([name, *rates, *pairs])
    head = [f"{GAINS_OF}: due", "CV", "devices"]
    return _table(["assumed", *report["rates"], *head], lines)


def _median(rates: Sequence[float | None], digits: str = ".2f") -> str:
    """The median. None means that no value meets the bar, which is worse than all values."""
    return _text(statistics.median(_values(rates)), digits)


def _spread(rates: Sequence[float | None]) -> str:
    """The median with the least and the greatest."""
    values = _values(rates)
    if not values:
        return ""
    middle, lowest, highest = (
        _text(number, ".2f") for number in (statistics.median(values), min(values), max(values))
    )
    return middle if lowest == highest else f"{middle} ({lowest}-{highest})"


def _values(rates: Sequence[float | None]) -> list[float]:
    return [math.inf if value is None else value for value in rates]


def _text(number: float, digits: str) -> str:
    return f"{number:{digits}}" if 0.0 < number < math.inf else "none"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
