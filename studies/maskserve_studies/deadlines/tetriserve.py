"""TetriServe's problem with published prices: which of its statements hold, what its policy and
ours gain there, bursts (Figs. 8 and 9), SD3 on A40 (Fig. 10) and one size at a time (Fig. 12).
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import mean, pstdev
from typing import Any, Final

from maskserve_benchmarks.reports import table
from maskserve_benchmarks.simulator.inputs import inputs_table
from maskserve_studies.deadlines.gangs import (
    MIXES,
    SIZES,
    Load,
    Outcome,
    draw,
    simulate,
    step_times,
)
from maskserve_studies.deadlines.prices import (
    A40_SHARES,
    PRICES,
    STEPS,
    XDIT,
    inputs,
    law_error,
    sd3_times,
    steps_at_peak,
)
from maskserve_studies.deadlines.simulation import DEVICES, FIXED, SCALES, point, policies

Report = dict[str, Any]

SEEDS: Final = (1, 2, 3)
POLICIES: Final = (*FIXED, "rounds2", "rounds5", "deadline")
SHOWN: Final = (("compiled", 28), ("compiled", 50))
"""Prices and steps of the runs over scales, bursts and sizes."""
BURSTS: Final = (1.0, 3.0)
"""Coefficients of variation of the gaps."""
WINDOW: Final = 120.0
"""Seconds of a window of the share over time."""
A40: Final = 4
SD3_STEPS: Final = (20, 28)


def statements(sar: dict[str, float], by_size: dict[str, dict[str, float]]) -> list[str]:
    """Return the paper's statements on fixed degrees (§2.3, uniform, scale 1.0) that hold.

    - A: no degree has above 0.6 in time.
    - B: degrees 1 and 2 have nearly all pictures of 256x256 in time and none of 2048x2048.
    - C: degrees 4 and 8 have most pictures of 2048x2048 in time.
    """
    by_statement = {
        "A": max(sar[name] for name in FIXED) <= 0.6,
        "B": all(by_size[n]["256"] >= 0.9 and by_size[n]["2048"] <= 0.05 for n in FIXED[:2]),
        "C": all(by_size[n]["2048"] >= 0.5 for n in FIXED[2:]),
    }
    return [name for name, holds in by_statement.items() if holds]


def problem(seeds: Sequence[int]) -> list[Report]:
    """Shares in time at the uniform mix and scale 1.0, over all prices and numbers of steps."""
    reports = []
    for (name, costs), steps in itertools.product(PRICES.items(), STEPS):
        at = point(Load(steps=steps), step_times(costs), POLICIES, seeds)
        true_statements = statements(at["sar"], at["by_size"])
        reports.append({"prices": name, "steps": steps, **at, "statements": true_statements})
    return reports


def scales(seeds: Sequence[int]) -> list[Report]:
    """Shares in time over the scales of the due times (Figs. 6 and 7)."""
    return [
        {
            "prices": name,
            "steps": steps,
            **point(Load(mix, scale=scale, steps=steps), step_times(PRICES[name]), POLICIES, seeds),
        }
        for (name, steps), mix, scale in itertools.product(SHOWN, MIXES, SCALES)
    ]


def gain(at: Report, policy: str, degrees: Sequence[str] = FIXED) -> float:
    """Return the points that a policy has over the best fixed degree."""
    sar = at["sar"]
    return float(100 * (sar[policy] - max(sar[name] for name in degrees)))


def over_time(outcome: Outcome) -> list[float]:
    """Return the share in time of the edits that arrive in each window."""
    windows = defaultdict(list)
    for ticket in outcome.tickets.values():
        windows[int(ticket.arrival / WINDOW)].append(outcome.is_in_time(ticket))
    return [mean(windows[window]) for window in sorted(windows)]


def bursts(seeds: Sequence[int]) -> list[Report]:
    """Shares over time and mean degrees of the uniform mix at scale 1.5 (Figs. 8 and 9)."""
    reports = []
    for (name, steps), cv in itertools.product(SHOWN, BURSTS):
        times = step_times(PRICES[name])
        load = Load(scale=1.5, steps=steps, cv=cv)
        report: Report = {"prices": name, "steps": steps, "cv": cv, "policies": {}}
        for policy in POLICIES:
            runs = [
                simulate(policies(times)[policy](), draw(load, times, seed), DEVICES)
                for seed in seeds
            ]
            series = [over_time(run) for run in runs]
            windows = [share for shares in series for share in shares]
            report["policies"][policy] = {
                "sar": mean(run.in_time() for run in runs),
                "deviation": pstdev(windows),
                "least": min(windows),
                "degrees": {
                    str(side): mean(run.mean_degree(f"{side}-") for run in runs) for side in SIZES
                },
                "over_time": [round(share, 3) for share in series[0]],
            }
        reports.append(report)
    return reports


def sizes(seeds: Sequence[int]) -> list[Report]:
    """Shares in time where all pictures have one size, at scale 1.5 (Fig. 12)."""
    return [
        {
            "prices": name,
            "steps": steps,
            **point(
                Load(str(side), scale=1.5, steps=steps),
                step_times(PRICES[name]),
                POLICIES,
                seeds,
            ),
        }
        for (name, steps), side in itertools.product(SHOWN, SIZES)
    ]


SD3_POLICIES: Final = tuple(name for name in POLICIES if name != f"sp{DEVICES}")


def sd3_on_a40(seeds: Sequence[int]) -> list[Report]:
    """Shares in time of SD3 on four A40 (Fig. 10)."""
    return [
        {
            "share": share,
            "steps": steps,
            **point(
                Load(mix, scale=scale, steps=steps),
                sd3_times(share),
                SD3_POLICIES,
                seeds,
                devices=A40,
            ),
        }
        for share, steps, mix, scale in itertools.product(
            A40_SHARES, SD3_STEPS, MIXES, (SCALES[0], SCALES[-1])
        )
    ]


def run_tetriserve(say: Callable[[str], None], seeds: Sequence[int] = SEEDS) -> Report:
    """Run all parts.

    Args:
        say: prints progress.
        seeds: of the draws.
    """
    say(f"seeds {', '.join(map(str, seeds))}")
    report: Report = {
        "seeds": list(seeds),
        "inputs": inputs(),
        "law_error": {name: law_error(name) for name in XDIT},
        "steps_at_peak": {str(degree): steps_at_peak(degree) for degree in (4, 8)},
        "step_ms": {
            name: {
                str(side): [round(1e3 * s, 1) for s in seconds]
                for side, seconds in step_times(costs).items()
            }
            for name, costs in PRICES.items()
        },
        "sd3_step_ms": {
            f"{share:g}": {
                str(side): [round(1e3 * s, 1) for s in seconds]
                for side, seconds in sd3_times(share).items()
            }
            for share in A40_SHARES
        },
    }
    for name, part in (
        ("problem", problem), ("scales", scales), ("bursts", bursts), ("sizes", sizes),
        ("sd3", sd3_on_a40),
    ):  # fmt: skip
        report[name] = part(seeds)
        say(f"{name}: {len(report[name])} points")
    rounded: Report = json.loads(json.dumps(report), parse_float=lambda n: round(float(n), 4))
    return rounded


# The tables of docs/benchmarks/tetriserve.md


_HEAD = ("SP 1", "2", "4", "8", "rounds of 2", "of 5", "`deadline`")


def _shares(sar: dict[str, float], names: Sequence[str] = POLICIES) -> list[str]:
    return [f"{sar[name]:.2f}" for name in names]


def problem_table(report: Report) -> str:
    return table(
        ("prices", "steps", *_HEAD, "hold"),
        [
            (at["prices"], at["steps"], *_shares(at["sar"]), ", ".join(at["statements"]))
            for at in report["problem"]
        ],
    )


def step_table(report: Report) -> str:
    return table(
        ("ms of a step on 1, 2, 4, 8", *(f"{side}²" for side in SIZES)),
        [
            (name, *(", ".join(f"{s:.0f}" for s in times[str(side)]) for side in SIZES))
            for name, times in report["step_ms"].items()
        ],
    )


def gains_table(report: Report) -> str:
    """Points over the best fixed degree, by scale: mean, and most with its scale."""
    rows = []
    for (name, steps), mix in itertools.product(SHOWN, MIXES):
        points = [
            at
            for at in report["scales"]
            if (at["prices"], at["steps"], at["mix"]) == (name, steps, mix)
        ]
        cells = []
        for policy in POLICIES[len(FIXED) :]:
            gains = [gain(at, policy) for at in points]
            best = max(range(len(gains)), key=gains.__getitem__)
            cells.append(f"{mean(gains):.0f}, {gains[best]:.0f} at {points[best]['scale']:g}")
        rows.append((f"{name}, {steps}", mix, *cells))
    return table(("prices, steps", "mix", *_HEAD[len(FIXED) :]), rows)


def bursts_table(report: Report) -> str:
    return table(
        ("prices, steps", "CV", *_HEAD),
        [
            (
                f"{at['prices']}, {at['steps']}",
                f"{at['cv']:g}",
                *(
                    f"{p['sar']:.2f} ± {p['deviation']:.2f}, {p['least']:.2f}"
                    for p in at["policies"].values()
                ),
            )
            for at in report["bursts"]
        ],
    )


def degrees_table(report: Report) -> str:
    return table(
        ("prices, steps", "CV", "policy", *(f"{side}²" for side in SIZES)),
        [
            (
                f"{at['prices']}, {at['steps']}",
                f"{at['cv']:g}",
                policy,
                *(f"{at['policies'][policy]['degrees'][str(side)]:.1f}" for side in SIZES),
            )
            for at in report["bursts"]
            for policy in ("rounds5", "deadline")
        ],
    )


def sizes_table(report: Report) -> str:
    return table(
        ("prices, steps", "size", *_HEAD),
        [
            (f"{at['prices']}, {at['steps']}", f"{at['mix']}²", *_shares(at["sar"]))
            for at in report["sizes"]
        ],
    )


def sd3_table(report: Report) -> str:
    return table(
        ("share of the peak, steps", "mix, scale", "SP 1", "2", "4", *_HEAD[-3:]),
        [
            (
                f"{at['share']:g}, {at['steps']}",
                f"{at['mix']}, {at['scale']:g}",
                *_shares(at["sar"], SD3_POLICIES),
            )
            for at in report["sd3"]
        ],
    )


TABLES: Final = (
    problem_table, step_table, gains_table, bursts_table, degrees_table, sizes_table, sd3_table,
)  # fmt: skip


def tables(report: Report) -> list[str]:
    """Return all tables of the page."""
    return [inputs_table(inputs()), *(make(report) for make in TABLES)]
