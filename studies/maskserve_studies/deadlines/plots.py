"""Plots of the study of due times, panel by panel as in TetriServe's figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Report = Mapping[str, Any]
_STYLES = {
    "sp1": ("fixed, 1 device", "0.8", "-"),
    "sp2": ("fixed, 2", "0.65", "-"),
    "sp4": ("fixed, 4", "0.5", "-"),
    "sp8": ("fixed, 8", "0.3", "-"),
    "per_resolution": ("a degree per resolution", "tab:green", "--"),
    "rounds5": ("rounds of 5 steps", "tab:blue", "-"),
    "deadline": ("deadline", "tab:orange", "-"),
}
_LENGTHS = {"rounds1": "1", "rounds2": "2", "rounds5": "5", "rounds10": "10"}


def draw(report: Report, folder: Path) -> None:
    """Draw `deadlines_scales.png` (Figs. 6 and 7), `deadlines_rates.png` (Fig. 11) and
    `deadlines_rounds.png` (Fig. 13).

    Args:
        report: the result of `run_deadlines`.
        folder: the folder of the plots.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _scales(report["scales"], folder / "deadlines_scales.png")
    _rates(report["rates"], folder / "deadlines_rates.png")
    _rounds(report["round_lengths"], folder / "deadlines_rounds.png")


def _scales(points: Sequence[Report], path: Path) -> None:
    figure, rows = plt.subplots(2, 3, figsize=(13.0, 7.0), sharey=True)
    for mix, row in zip(("uniform", "skewed"), rows, strict=True):
        of_mix = [at for at in points if at["mix"] == mix]
        _lines(row[0], [at["scale"] for at in of_mix], of_mix)
        row[0].set(xlabel="scale of the due times", ylabel=f"{mix}: share in time (SAR)")
        for axes, scale in zip(row[1:], (of_mix[0], of_mix[-1]), strict=True):
            _bars(axes, scale["by_size"])
            axes.set_title(f"by resolution at {scale['scale']:g}x", fontsize=10)
    _save(figure, rows[0][0], path)


def _rates(points: Sequence[Report], path: Path) -> None:
    figure, panels = plt.subplots(1, 2, figsize=(9.5, 4.4), sharey=True)
    for mix, axes in zip(("uniform", "skewed"), panels, strict=True):
        of_mix = [at for at in points if at["mix"] == mix]
        _lines(axes, [at["per_minute"] for at in of_mix], of_mix)
        axes.set(xlabel="edits per minute", title=f"{mix}, 1.0x")
    panels[0].set_ylabel("share in time (SAR)")
    _save(figure, panels[0], path)


def _rounds(points: Sequence[Report], path: Path) -> None:
    costs = sorted({at["decision_seconds"] for at in points})
    figure, panels = plt.subplots(1, len(costs), figsize=(13.0, 3.8), sharey=True)
    for cost, axes in zip(costs, panels, strict=True):
        for at in [at for at in points if at["decision_seconds"] == cost]:
            shares = [at["sar"][name] for name in _LENGTHS]
            axes.plot(list(_LENGTHS.values()), shares, "o-", label=f"{at['per_minute']:g}/min")
        axes.set(xlabel="steps of a round", title=f"a decision takes {1e3 * cost:g} ms")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("uniform, 1.0x: share in time (SAR)")
    _save(figure, panels[0], path)


def _lines(axes: Any, at: Iterable[float], points: Sequence[Report]) -> None:
    for name, (label, colour, dashes) in _STYLES.items():
        shares = [point["sar"][name] for point in points]
        axes.plot(list(at), shares, dashes, color=colour, marker=".", label=label)
    axes.set_ylim(0.0, 1.0)
    axes.grid(alpha=0.3)


def _bars(axes: Any, by_size: Mapping[str, Mapping[str, float]]) -> None:
    """One group of bars per resolution. The paper uses spider plots."""
    width = 0.8 / len(_STYLES)
    for number, (name, (_, colour, _)) in enumerate(_STYLES.items()):
        places = [place + width * number for place in range(len(by_size[name]))]
        axes.bar(places, by_size[name].values(), width, color=colour)
    axes.set_xticks([place + 0.35 for place in range(len(by_size["deadline"]))])
    axes.set_xticklabels([f"{side}²" for side in by_size["deadline"]])


def _save(figure: Any, axes: Any, path: Path) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0.0, 0.06, 1.0, 1.0))
    figure.savefig(path, dpi=80)
    plt.close(figure)
