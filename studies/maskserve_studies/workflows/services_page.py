"""The page of services and monoliths (LegoDiffusion Fig. 4 left, Table 3)."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import Any

from maskserve_benchmarks.reports import table


def services_text(summary: Mapping[str, Any]) -> str:
    """Return the page's text, of the parts `monoliths`, `replicas` and `due` as far as they were
    measured.
    """
    rows: list[tuple[str, object]] = []
    if "shared_of_monoliths_mib" in summary:
        rows += [
            (
                "memory of three workflows at once: one server, a server for each",
                f"{summary['shared_mib']:.0f}, {summary['monoliths_mib']:.0f} MiB "
                f"({summary['shared_of_monoliths_mib']})",
            ),
            (
                "mean seconds of their runs: one server, a server for each",
                f"{summary['shared_s']}, {summary['monoliths_s']} "
                f"({summary['shared_of_monoliths_s']})",
            ),
        ]
    if "replicas_edits_ratio" in summary:
        rows += [
            (
                "edits of one step per second with two replicas of the stage service, over one",
                summary["replicas_edits_ratio"],
            ),
            (
                "edits while a replica is killed: all, lost, with other bytes",
                f"{summary['killed_edits']}, {summary['killed_lost']}, {summary['killed_wrong']}",
            ),
        ]
    rows += [
        (
            f"plans in time at load {load}, `{order}`: real router less simulator, points",
            round(mean(points), 1),
        )
        for load, by_order in summary.get("due_apart_points", {}).items()
        for order, points in by_order.items()
    ]
    return (
        "The demo model on a real Triton; all processes share the machine's cores. Memory is the "
        "peak of proportional set sizes, so what servers share, such as torch, counts once. Plans "
        "run at the real router before emulated servers.\n\n" + table(("", "measured"), rows)
    )
