"""The page of the run, from its JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maskserve_benchmarks.reports import table

_TITLES = {
    "a": "FLUX Fill in bfloat16, beside diffusers' pipeline",
    "b": "FLUX Fill in FP8, beside compiled pipelines, and Poisson arrivals",
    "c": "Batch sizes, loads, SDXL, and klein 4B",
}
_HEAD = (
    "# Whole edits on a GPU",
    "",
    "`scripts/bench gpu_run --page` writes this page from {json}. Do not edit. "
    "[gpu.md](../gpu.md#a-quarter-of-an-hour-on-a-gpu) says how to run it.",
)
_NEVER = "It has not run on a GPU. There is no number until it has."
_IN_JSON_ALONE = ("tflops", "weights_gb", "least_s")
"""Figures from which others follow."""
_NOTES = (
    "Weights are random, so pictures mean nothing, and FirstBlockCache skips as it happens to. "
    "*Of limit*: the least time of the steps by their FLOPs and the bytes of the weights, as a "
    "share of the time measured; encoders and VAE are not counted, so no side reaches 1. Sides "
    "take turns in one run; figures are medians.",
)


def write_page(file: Path) -> Path:
    """Write FILE.md beside the JSON file, which may be missing, and return it."""
    report = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    page = file.with_suffix(".md")
    page.write_text("\n".join(_lines(report, file)) + "\n", encoding="utf-8")
    return page


def _lines(report: Mapping[str, Any], file: Path) -> list[str]:
    name = f"[{file.name}]({file.name})" if file.exists() else f"`{file.name}`"
    lines = [line.format(json=name) for line in _HEAD]
    if not any(part["on_gpu"] for part in report.values()):
        lines += ["", _NEVER]
    if report:
        lines += ["", *_NOTES]
    for part, title in _TITLES.items():
        if part in report:
            lines += ["", f"## {title}", "", *_part(report[part])]
    return lines


def _part(part: Mapping[str, Any]) -> list[str]:
    lines = [
        f"`{part['command']}`, {part['hardware']}, {part['date']}, torch {part['torch']}, "
        f"{part['seconds']:g} s."
    ]
    lines += _in_short(part["steps"])
    missing = []
    for name, step in part["steps"].items():
        if "why" in step:
            missing.append(f"- {name}: {step['why']}")
        elif step.get("figures"):
            lines += ["", f"### {name[0].upper()}{name[1:]}", "", *_figures(step["figures"])]
    return [*lines, "", "### Not measured", "", *missing] if missing else lines


def _in_short(steps: Mapping[str, Any]) -> list[str]:
    """Return edits per second by case and side; nothing if no case was timed."""
    figures = {name: step.get("figures") for name, step in steps.items()}
    cases = {name: item for name, item in figures.items() if item and "times" in item}
    sides = [side for item in cases.values() for side in item if side not in ("times", "cut")]
    columns = list(dict.fromkeys(sides))
    rows = [
        [name, *(_cell(item.get(side, {}).get("edits_per_s", "")) for side in columns)]
        for name, item in cases.items()
    ]
    return ["", "Edits per second:", "", table(("case", *columns), rows)] if rows else []


def _figures(figures: Any) -> list[str]:
    if isinstance(figures, list):
        columns = list(figures[0])
        return [table(columns, [[_cell(row.get(name, "")) for name in columns] for row in figures])]
    rows = {name: item for name, item in figures.items() if isinstance(item, dict)}
    times = rows.pop("times", {})
    lines = [f"{name}: {_cell(item)}" for name, item in figures.items() if name not in rows]
    lines = [line for line in lines if not line.startswith("times: ")]
    if rows:
        keys = [key for row in rows.values() for key in row if key not in _IN_JSON_ALONE]
        columns = list(dict.fromkeys(keys))
        cells = [
            [name, *(_cell(row.get(key, "")) for key in columns)] for name, row in rows.items()
        ]
        lines = [*lines, *([""] if lines else []), table(("side", *columns), cells)]
    if times:
        lines += ["", *(f"- {name}: {value:g} times" for name, value in times.items())]
    return lines


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(item)}" for name, item in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)
