"""Pictures: latencies of a run or of several, and the bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_SIZE = (7.0, 3.6)
_DPI = 90
_LOAD_ORDER = ("round_robin", "least_requests", "least_tokens", "mask_aware")
_COLOURS = dict(zip(_LOAD_ORDER, ("0.65", "tab:orange", "tab:green", "tab:blue"), strict=True))


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=_DPI)
    plt.close(figure)


def plot_latencies(latencies: Mapping[str, Sequence[float]], title: str, path: Path) -> None:
    """Share of edits that take longer than a time, one curve per policy."""
    figure, axes = plt.subplots(figsize=_SIZE)
    for name, values in latencies.items():
        ordered = np.sort(np.asarray(values))
        above = 1.0 - np.arange(len(ordered)) / len(ordered)
        axes.step(ordered, above, where="post", label=name, color=_COLOURS.get(name))
    axes.axhline(0.05, color="0.8", linewidth=0.8)
    axes.text(axes.get_xlim()[1], 0.052, "P95", ha="right", color="0.5", fontsize=8)
    axes.set_yscale("log")
    axes.set_ylim(2e-3, 1.0)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds from arrival to answer")
    axes.set_ylabel("share that takes longer")
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    _save(figure, path)


def plot_routing(reports: Sequence[Mapping[str, Any]], path: Path) -> None:
    """P95 of each policy as a multiple of mask_aware's, per case."""
    figure, axes = plt.subplots(figsize=(7.0, 0.42 * len(reports) + 1.2))
    for i, report in enumerate(reports):
        ours = report["p95"]["mask_aware"]
        axes.plot([0.9, 4.4], [i, i], color="0.92", linewidth=0.8, zorder=0)
        for policy in _LOAD_ORDER:
            axes.plot(
                report["p95"][policy] / ours,
                i,
                "o",
                color=_COLOURS[policy],
                label=policy if i == 0 else None,
                markersize=6,
            )
    axes.set_yticks(range(len(reports)))
    axes.set_yticklabels([f"{r['case']}, {r['load']:.0%}" for r in reports], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("P95 as a multiple of mask_aware's")
    axes.legend(frameon=False, fontsize=8, loc="center right")
    _save(figure, path)


def plot_batching(reports: Sequence[Mapping[str, Any]], path: Path) -> None:
    """P95 of static batching and the strawman over continuous batching."""
    figure, panels = plt.subplots(1, 2, figsize=_SIZE)
    for axes, mode, paper in zip(panels, ("static", "strawman"), (0.35, 0.40), strict=True):
        for overhead in sorted({r["overhead"] for r in reports}):
            mine = [r for r in reports if r["overhead"] == overhead]
            axes.plot(
                [r["rate"] for r in mine],
                [100 * r["over"][mode] for r in mine],
                "o-",
                label=f"{overhead:.0%} of a dense step is fixed",
                markersize=4,
            )
        axes.axhline(100 * paper, color="0.6", linestyle="--", linewidth=0.8)
        axes.axhline(0, color="0.85", linewidth=0.8)
        axes.text(0.2, 100 * paper, "paper, 0.5/s", va="bottom", color="0.5", fontsize=8)
        axes.set_title(mode, fontsize=10)
        axes.set_xlabel("edits per second")
    panels[0].set_ylabel("P95 over continuous batching, %")
    panels[0].legend(frameon=False, fontsize=7)
    _save(figure, path)


def plot_residency(reports: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Fetches, dense misses and P95 with and without knowing where templates are."""
    figure, panels = plt.subplots(1, 2, figsize=_SIZE)
    shown = (("the rest on disk", "fetches"), ("the rest nowhere", "dense_misses"))
    for axes, (case, key) in zip(panels, shown, strict=True):
        mine = [r for r in reports if r["case"] == case]
        bars = axes.bar(range(len(mine)), [r[key] for r in mine], color=("0.65", "0.8", "tab:blue"))
        axes.bar_label(bars, [f"P95\n{r['p95']:.1f} s" for r in mine], fontsize=8, padding=2)
        axes.set_xticks(range(len(mine)))
        axes.set_xticklabels([r["policy"].replace(", ", ",\n") for r in mine], fontsize=8)
        axes.set_title(f"{case}: {key.replace('_', ' ')}", fontsize=10)
        axes.margins(y=0.2)
    _save(figure, path)
