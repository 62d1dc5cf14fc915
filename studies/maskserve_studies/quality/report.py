"""Tables, plots and picture sheets of a quality run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from maskserve_benchmarks.demo_model.scenes import Edit
from maskserve_studies.quality.metrics import Picture

_COLUMNS = (
    ("ssim", "SSIM"),
    ("ssim_in_mask", "SSIM in mask"),
    ("psnr_in_mask", "PSNR in mask"),
    ("pooled_psnr_in_mask", "pooled"),
    ("share_below_30", "under 30 dB"),
    ("worst_psnr_in_mask", "worst edit"),
    ("worst_class_psnr_in_mask", "worst class"),
    ("outside_max_abs_diff", "outside max diff"),
    ("prompt_followed", "prompt followed"),
    ("flux_gib_per_template", "FLUX GiB"),
    ("flux_flops_of_no_ring", "FLUX FLOPs"),
)
_RIVALS = (
    "masked_tokens_alone",
    "masked_tokens_and_ring_alone",
    "crop_and_stitch",
    "first_block_cache",
)


def table(systems: Mapping[str, Mapping[str, Any]]) -> str:
    """Return two markdown tables: one with a row per system, one with mean and worst PSNR per
    class.
    """
    columns = [
        (key, title)
        for key, title in _COLUMNS
        if any(row.get(key) is not None for row in systems.values())
    ]
    lines = [
        "| system | " + " | ".join(title for _, title in columns) + " |",
        "|---" * (1 + len(columns)) + "|",
    ]
    for name, row in systems.items():
        cells = ["" if row.get(key) is None else f"{row[key]:.4g}" for key, _ in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    classes = list(next(iter(systems.values()))["classes"])
    lines += [
        "",
        "| PSNR in mask, mean / worst | " + " | ".join(classes) + " |",
        "|---" * (1 + len(classes)) + "|",
    ]
    for name, row in systems.items():
        class_rows = [row["classes"][class_name] for class_name in classes]
        cells = [f"{c['psnr_in_mask']:.1f} / {c['worst_psnr_in_mask']:.1f}" for c in class_rows]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot_frontier(systems: Mapping[str, Mapping[str, Any]], folder: Path, semantics: str) -> None:
    """Plot fidelity over bytes and FLOPs, for the mean and the worst class; rivals are lines."""
    cached = {name: row for name, row in systems.items() if "flux_gib_per_template" in row}
    for key, label, file in (
        ("flux_gib_per_template", "GiB per FLUX.1-dev template, 1024x1024", "bytes"),
        ("flux_flops_of_no_ring", "FLOPs at mask ratio 0.11, of today's without a ring", "flops"),
    ):
        _plot_over(cached, systems, key, label, folder / f"quality_{file}_{semantics}.png")


def _plot_over(
    cached: Mapping[str, Mapping[str, Any]],
    systems: Mapping[str, Mapping[str, Any]],
    key: str,
    label: str,
    path: Path,
) -> None:
    figure, panels = _pyplot().subplots(1, 2, figsize=(13, 5.5), sharex=True)
    for axes, value, title, bar in zip(
        panels,
        ("psnr_in_mask", "worst_class_psnr_in_mask"),
        ("mean of all edits", "mean of the worst class"),
        (40, 30),
        strict=True,
    ):
        for ring, colour in enumerate(("tab:red", "tab:blue", "tab:green", "tab:purple")):
            ring_systems = {n: r for n, r in cached.items() if f"-ring{ring}" in n}
            xs, ys = (
                [r[key] for r in ring_systems.values()],
                [r[value] for r in ring_systems.values()],
            )
            axes.plot(xs, ys, "o", color=colour, markersize=4, label=f"ring {ring}")
            for name, x, y in zip(ring_systems, xs, ys, strict=True):
                short = name.replace(f"-ring{ring}", "").replace("stride", "s")
                axes.annotate(short, (x, y), fontsize=5, xytext=(3, 2), textcoords="offset points")
        dense_rows = {n: r for n, r in cached.items() if n.startswith("dense-interval") and r[key]}
        axes.plot(
            [row[key] for row in dense_rows.values()],
            [row[value] for row in dense_rows.values()],
            "x",
            color="black",
            markersize=5,
            label="step_interval, no other cache",
        )
        for name, row in dense_rows.items():
            axes.annotate(
                name.removeprefix("dense-interval"), (row[key], row[value]), fontsize=5,
                xytext=(3, 2), textcoords="offset points",
            )  # fmt: skip
        for name in _RIVALS:
            if name in systems:
                at = systems[name][value]
                axes.axhline(at, linestyle=":", linewidth=1, color="grey")
                axes.text(
                    0.01,
                    at,
                    name.replace("_", " "),
                    transform=axes.get_yaxis_transform(),
                    fontsize=7,
                )
        axes.axhline(bar, linestyle="--", linewidth=1, color="black")
        axes.set_xscale("log")
        axes.set_xlabel(label)
        axes.set_ylabel("PSNR inside the mask, dB")
        axes.set_title(title, fontsize=9)
        axes.legend(fontsize=7, loc="lower right")
    _save(figure, path)


def plot_rim(errors: Mapping[str, Sequence[float]], path: Path) -> None:
    """Plot the error over the distance from the mask's rim, one line per system."""
    figure, axes = _pyplot().subplots(figsize=(7, 4.5))
    for name, values in errors.items():
        if any(values):
            axes.plot(range(1, len(values) + 1), values, label=name.replace("_", " "))
    axes.set_xlabel("pixels from the mask's rim (a token is 8)")
    axes.set_ylabel("root mean squared error, 0 to 255")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)
    _save(figure, path)


def draw_worst(
    classes: Mapping[str, Sequence[Edit]],
    pictures: Mapping[str, Mapping[str, Sequence[Picture]]],
    reference: str,
    judged: str,
    path: Path,
) -> None:
    """Draw for each class the edit in which `judged` differs most from `reference`, by every
    system.
    """
    names = ["source", reference, *(name for name in pictures if name != reference)]
    h, w = next(iter(classes.values()))[0].source.shape[:2]
    sheet = Image.new("RGB", (len(names) * (w + 4), len(classes) * (h + 16) + 16), "white")
    draw = ImageDraw.Draw(sheet)
    for i, name in enumerate(names):
        draw.text((i * (w + 4), 2), name[:22], fill="black")
    for line, (kind, edits) in enumerate(classes.items()):
        distance = [
            float(((a.astype(float) - b)[edit.mask] ** 2).mean())
            for edit, a, b in zip(
                edits, pictures[judged][kind], pictures[reference][kind], strict=True
            )
        ]
        number, top = int(np.argmax(distance)), 16 + line * (h + 16)
        tiles = [_outlined(edits[number]), *(pictures[name][kind][number] for name in names[1:])]
        for i, tile in enumerate(tiles):
            sheet.paste(Image.fromarray(tile), (i * (w + 4), top))
        draw.text((0, top + h + 1), f"{kind} {number}: {edits[number].prompt!r}", fill="black")
    sheet.save(path, optimize=True)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    _pyplot().close(figure)


def _outlined(edit: Edit) -> Picture:
    inner = edit.mask.copy()
    for axis in (0, 1):
        for shift in (-1, 1):
            inner &= np.roll(edit.mask, shift, axis)
    picture = edit.source.copy()
    picture[edit.mask & ~inner] = (255, 0, 255)
    return picture
