"""Tables of docs/decisions/simulator.md, of docs/benchmarks/workflows-simulated.json."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from maskserve_harness.simulator.plan_figures import GAINS_OF
from maskserve_harness.simulator.plan_systems import MONOLITHS

Report = dict[str, Any]


def rates_table(report: Report) -> str:
    """Rates: the median over the seeds, and what they are from and to."""
    names = [*MONOLITHS, "ours", "lego_at_ours"]
    found = (
        report["rates"]
        | {f"S4, {name}": of for name, of in report["sweeps"].items()}
        | {f"{name} by turns": of for name, of in report["by_turns"].items()}
        | {"S4, masks": report["masks"]}
    )
    lines = [[name, *(_spread(of.get(each, ())) for each in names)] for name, of in found.items()]
    return _table(["", *names[:-1], "lego in time at our rate"], lines)


def gains_table(report: Report) -> str:
    """Ours over planned monoliths under each set of assumptions: times the rate; of one setting the
    due times, bursts and devices of both.
    """
    lines = []
    for name, found in report["assumed"].items():
        rates = [_times(of["ours"][0], of["planned"][0]) for of in found["rates"].values()]
        both = found[GAINS_OF]
        pairs = [f"{_told(each['planned'])} / {_told(each['ours'])}" for each in both.values()]
        lines.append([name, *rates, *pairs])
    head = [f"{GAINS_OF}: due", "CV", "devices"]
    return _table(["assumed", *report["rates"], *head], lines)


def _spread(found: Sequence[float]) -> str:
    if len(found) < 2:
        return "".join(f"{one:.2f}" for one in found)
    return f"{statistics.median(found):.2f} ({min(found):.2f}-{max(found):.2f})"


def _times(ours: float, other: float) -> str:
    return f"{ours / other:.2f}" if other else "none"


def _told(value: float | None) -> str:
    return f"{value:.3g}" if value else "none"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
