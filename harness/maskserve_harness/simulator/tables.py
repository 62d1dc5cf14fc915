"""The tables of docs/decisions, in markdown, from what `--bars` found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from maskserve_harness.simulator.bars import POLICY_NAMES, Report

_RIVALS = POLICY_NAMES[:-1]


def tables(report: Report) -> str:
    """Routing, batching and residency, one after the other."""
    return "\n".join(
        [
            *_table(
                ("case", "load", *POLICY_NAMES, *(f"under {name}" for name in _RIVALS)),
                (_routed(each) for each in report["routing"]),
            ),
            *_table(
                (
                    "fixed",
                    "edits/s",
                    "P95 continuous",
                    "static",
                    "strawman",
                    "interruptions P50 / P95",
                    "rows per step",
                ),
                (_batched(each) for each in report["batching"]),
            ),
            *_table(
                (
                    "the other templates",
                    "load",
                    "policy",
                    "P95",
                    "mean",
                    "fetches from disk",
                    "dense misses",
                    "templates primed",
                ),
                (_resident(each) for each in report["residency"]),
            ),
        ]
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines] + [""]


def _routed(report: Report) -> list[str]:
    margins = [report["under"][rival] for rival in _RIVALS]
    return [
        report["case"] + (" **(bar)**" if report["bar"] else ""),
        f"{report['load']:.0%}",
        *(f"{report['p95'][policy]:.2f}" for policy in POLICY_NAMES),
        *(f"{100 * m['margin']:.1f} ± {100 * m['standard_error']:.1f} %" for m in margins),
    ]


def _batched(report: Report) -> list[str]:
    over = report["over"]
    return [
        f"{report['overhead']:.0%}",
        f"{report['rate']:.1f}",
        f"{report['p95']['continuous']:.2f} s",
        *(f"{100 * over[name]:+.0f} %" for name in ("static", "strawman")),
        f"{report['interruptions_p50']:.0f} / {report['interruptions_p95']:.0f}",
        f"{report['batch']['continuous']:.1f}",
    ]


def _resident(report: Report) -> list[str]:
    return [
        report["case"].removeprefix("the rest "),
        f"{report['load']:.0%}",
        report["policy"],
        f"{report['p95']:.2f} s",
        f"{report['mean']:.2f} s",
        *(f"{report[name]:.0f}" for name in ("fetches", "dense_misses", "primed")),
    ]
