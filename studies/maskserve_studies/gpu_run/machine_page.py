"""The page of a machine's measurement: tables and plots of the parts that its JSON has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maskserve_benchmarks.reports import table

Report = Mapping[str, Any]
_GIB = 2**30
_COLOURS = {"dense": "0.5", "kv": "tab:orange", "project": "tab:blue"}


def write_page(report: Report, file: Path) -> None:
    """Write the page FILE.md, and beside it FILE-steps.png and FILE-memory.png.

    Args:
        report: the report of `machine`; parts may be missing.
        file: the JSON file of the report.
    """
    plots = {}
    if "steps" in report:
        plots["steps"] = _plot_steps(report["steps"], file.with_name(f"{file.stem}-steps.png"))
    if "held" in report:
        plots["held"] = _plot_memory(report["held"], file.with_name(f"{file.stem}-memory.png"))
    text = "\n".join(_lines(report, {part: plot.name for part, plot in plots.items()}))
    file.with_suffix(".md").write_text(text + "\n", encoding="utf-8")


def _lines(report: Report, plots: Mapping[str, str]) -> list[str]:
    lines = [
        f"# Steps on {report['hardware']}",
        "",
        f"Made by `{report['command']}` on {report['date']}, torch {report['torch']}, in "
        f"{report.get('seconds', 0):g} s. Do not edit: the command writes it.",
        "",
        *(f"- {name}: {version}" for name, version in report.get("versions", {}).items()),
    ]
    failed = report.get("failed", {})
    for name, line in _FACTS.items():
        if name in report:
            lines.append(f"- {line(report[name])}")
        elif name in failed:
            lines.append(f"- {name}: none, {failed[name]}")
    for name, (title, section) in _SECTIONS.items():
        if name not in report:
            continue
        lines += ["", f"## {title.format(**report)}", "", *section(report[name])]
        if name in plots:
            lines += ["", f"![{title}]({plots[name]})"]
    titles: dict[str, list[str]] = {}
    for name, (title, _) in _SECTIONS.items():
        if name in failed and name not in report:
            titles.setdefault(failed[name], []).append(
                title.format_map({"unet": "a UNet", **report})
            )
    missing = [f"- {'; '.join(names)}: {why}" for why, names in titles.items()]
    return [*lines, "", "## Not measured", "", *missing] if missing else lines


def _tests(passed: bool) -> str:
    return f"tests/gpu {'passed' if passed else 'FAILED'}"


def _model(model: Report) -> str:
    weights, total, free = (f"{model[name] / _GIB:.1f}" for name in ("weights", "total", "free"))
    return (
        f"{model['name']}: weights {weights} GiB; {free} of the device's {total} GiB were free "
        "beside them"
    )


def _rates(rates: Report) -> str:
    rates_text = ", ".join(f"{name} {rate:g}" for name, rate in rates.items())
    return (
        f"entries from host memory, GB/s: {rates_text} (gathered: of tokens outside a mask; "
        "whole: of "
        "all; link: a plain copy from pinned memory)"
    )


def _stages(stages: Report) -> list[str]:
    t5, encoding, decoding = _tenths(stages, "t5_ms", "encode_ms", "decode_ms")
    vae_text = f"the VAE of {stages['side']}x{stages['side']}: encoding {encoding} ms"
    return [f"T5 over {stages['tokens']} tokens {t5} ms; {vae_text}, decoding {decoding} ms."]


def _load_table(loads: Sequence[Report]) -> list[str]:
    columns = ("way", "rows", "alone ms", "beside loads ms", "loads by themselves ms", "GB/s")
    keys = ("alone_ms", "beside_ms", "load_ms", "gb_per_s")
    return [
        "All entries of a step come from files in memory while it runs. *Alone*: they lie on the "
        "device.",
        "",
        table(columns, [(s["way"], s["batch"], *_tenths(s, *keys)) for s in loads]),
    ]


def _rival_table(rivals: Sequence[Report]) -> list[str]:
    rows = [
        (r.get("batch", "–"), r["who"], f"{r['ms']:.1f}" if "ms" in r else f"none: {r['why']}")
        for r in rivals
    ]
    return [
        "Dense steps of diffusers' transformer with the same weights, in turn with ours, dense and "
        "cached.",
        "",
        table(("rows", "who", "step ms"), rows),
    ]


def _step_table(steps: Sequence[Report]) -> list[str]:
    columns = ("rows", "m", "kind", "entries", "step", "limit", "dense step", "its limit", "times")
    keys = ("ms", "limit_ms", "dense_ms", "dense_limit_ms")
    rows = [
        (s["batch"], _ratio(s), s["kind"], s["format"], *_tenths(s, *keys), _times(s))
        for s in steps
    ]
    return [
        "Milliseconds. *Limit*: the time of the counted FLOPs at the device's published peak. "
        "*Times*: faster than dense.",
        "",
        table(columns, rows),
    ]


def _mixed_table(steps: Sequence[Report]) -> list[str]:
    rows = [  # one ratio per row, or one for all rows
        (s["batch"], f"{np.mean(s['mask_ratio']):.2f}", *_tenths(s, "ms", "dense_ms"), _times(s))
        for s in steps
    ]
    return [table(("rows", "mean m", "step ms", "dense step ms", "times"), rows)]


def _own_table(steps: Sequence[Report]) -> list[str]:
    rows = [(_ratio(s), *_tenths(s, "anchor_ms", "ms")) for s in steps]
    return [table(("m", "refresh step ms", "step between ms"), rows)]


def _served_table(steps: Sequence[Report]) -> list[str]:
    columns = ("rows", "kind", "m", "dense", "step", "times", "of limit", "kernel by kernel")
    rows = [
        (
            *(s["batch"], s["kind"], _ratio(s), *_tenths(s, "dense_ms", "ms"), _times(s)),
            *(f"{s['of_limit']:.2f}", f"{s['asked_ms']:.1f}" if "asked_ms" in s else "–"),
        )
        for s in steps
    ]
    anchor_rows = [
        (
            *(s["batch"], _ratio(s), *_tenths(s, "ms", "anchor_ms")),
            *(
                f"{s['anchor_of_limit']:.2f}",
                f"{s['edit_times']:.2f}" if "edit_times" in s else "–",
            ),
        )
        for s in steps
        if "anchor_ms" in s
    ]
    return [
        "Milliseconds of steps as a worker takes them; steps of few tokens are CUDA graphs. "
        "*No-text*: between refresh steps. *Times*: faster than dense. *Of limit*: the share of "
        "what the FLOPs of both steps allow.",
        "",
        table(columns, rows),
        "",
        "A step between refresh steps, and one with a pass of lookahead over all tokens. "
        "*Edit*: how many times faster than dense an edit of a new picture is, counted from these.",
        "",
        table(("rows", "m", "step", "with lookahead", "of limit", "edit"), anchor_rows),
    ]


def _attention_table(steps: Sequence[Report]) -> list[str]:
    rows = [
        (
            *(s["batch"], s["queries"], s["keys"], f"{s['sdpa_ms']:.3f}"),
            f"{s['varlen_ms']:.3f}" if "varlen_ms" in s else "–",
        )
        for s in steps
    ]
    return [
        "Milliseconds of one block: `scaled_dot_product_attention`, and the variable-length kernel "
        "for the same rows.",
        "",
        table(("rows", "queries each", "keys each", "as alike rows", "variable-length"), rows),
    ]


def _placing_table(steps: Sequence[Report]) -> list[str]:
    rows = [
        (s["batch"], s["format"], s["changes"], f"{s['ms']:.3f}", f"{s['gb_per_s']:.0f}")
        for s in steps
    ]
    return [
        "Milliseconds of one block's keys and values at m = 0.11, and bytes read and written.",
        "",
        table(("rows", "entries", "changes added", "ms", "GB/s"), rows),
    ]


def _launch_table(steps: Sequence[Report]) -> list[str]:
    rows = [(s["batch"], _ratio(s), *_tenths(s, "asked_ms", "ms")) for s in steps]
    return [
        "A step of rows that were packed before. Launches delay nothing while the host launches "
        "kernels faster than the device runs them.",
        "",
        table(("rows", "m", "launched in ms", "step ms"), rows),
    ]


def _memory_table(steps: Sequence[Report]) -> list[str]:
    rows = []
    for step in steps:
        peak_gib, counted = (f"{step[key] / _GIB:.2f}" for key in ("held", "counted"))
        over = " **more than counted**" if step["held"] > step["counted"] else ""
        rows.append((step["batch"], _ratio(step), peak_gib, counted + over))
    return [
        "Without weights and entries. *Counted*: the room of the memory table.",
        "",
        table(("rows", "m", "held GiB", "counted GiB"), rows),
    ]


def _ratio(step: Report) -> str:
    return "dense" if step["mask_ratio"] is None else f"{step['mask_ratio']:.2f}"


def _times(step: Report) -> str:
    return f"{step['dense_ms'] / step['ms']:.2f}"


def _tenths(step: Report, *keys: str) -> list[str]:
    return [f"{step[key]:.1f}" for key in keys]


def _plot_steps(steps: Sequence[Report], file: Path) -> Path:
    """Plot one panel per number of rows: time over mask ratio, with dense steps and the limits."""
    batches = sorted({step["batch"] for step in steps})
    figure, axes = _figure(len(batches))
    for axis, batch in zip(axes, batches, strict=True):
        for kind, format in dict.fromkeys((step["kind"], step["format"]) for step in steps):
            selection = batch, kind, format
            kind_steps = [s for s in steps if (s["batch"], s["kind"], s["format"]) == selection]
            ratios, colour = [step["mask_ratio"] for step in kind_steps], _COLOURS.get(kind)
            style = "o-" if format == steps[0]["format"] else "x--"
            label = f"{kind}, {format}"
            axis.plot(ratios, [step["ms"] for step in kind_steps], style, color=colour, label=label)
            axis.plot(ratios, [step["limit_ms"] for step in kind_steps], ":", color=colour)
        axis.plot(
            ratios,
            [step["dense_ms"] for step in kind_steps],
            color=_COLOURS["dense"],
            label="dense",
        )
        axis.plot(
            ratios, [step["dense_limit_ms"] for step in kind_steps], ":", color=_COLOURS["dense"]
        )
        axis.set(
            title=f"{batch} row{'' if batch == 1 else 's'}", xlabel="mask ratio", ylim=(0, None)
        )
    axes[0].set_ylabel("ms per step; dotted: limit by FLOPs")
    axes[0].legend(frameon=False)
    figure.savefig(file)
    return file


def _plot_memory(steps: Sequence[Report], file: Path) -> Path:
    figure, [axis] = _figure(1)
    sizes = [[step[key] / _GIB for step in steps] for key in ("counted", "held")]
    largest = max(map(max, sizes))
    axis.plot([0, largest], [0, largest], ":", color=_COLOURS["dense"])
    axis.plot(*sizes, "o", color=_COLOURS["kv"])
    axis.set(xlabel="counted GiB", ylabel="held GiB", title="memory of a step")
    figure.savefig(file)
    return file


def _figure(panels: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * panels, 3.5), layout="constrained", dpi=110)
    axes = figure.subplots(1, panels, squeeze=False)
    return figure, list(axes[0])


_FACTS: dict[str, Callable[[Any], str]] = {
    "tests_passed": _tests,
    "model": _model,
    "attention": "attention: {}".format,
    "gb_per_s": _rates,
}
"""Parts that take one line of the page."""
_SECTIONS: dict[str, tuple[str, Callable[[Any], list[str]]]] = {
    "served": ("Steps as a worker takes them", _served_table),
    "attention_ms": ("Attention", _attention_table),
    "placing": ("Placing of entries", _placing_table),
    "steps": ("Steps", _step_table),
    "mixed": ("Steps of rows that differ", _mixed_table),
    "asked": ("Time of the host to launch a step", _launch_table),
    "unet_steps": ("Steps of {unet}", _mixed_table),
    "unet_own": ("Steps of {unet} with refresh steps", _own_table),
    "held": ("What steps hold", _memory_table),
    "loads": ("Steps that load their entries", _load_table),
    "rivals": ("Beside diffusers", _rival_table),
    "stages": ("T5 and the VAE", _stages),
}
