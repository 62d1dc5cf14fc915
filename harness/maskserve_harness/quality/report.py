"""Tables, plots and picture sheets of a quality run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from demo_model.scenes import Edit
from maskserve_harness.quality.metrics import Picture

_COLUMNS = ("ssim", "ssim_in_mask", "psnr_in_mask", "outside_max_abs_diff", "prompt_followed")


def table(systems: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown table, a row per system."""
    lines = [
        "| system | SSIM | SSIM in mask | PSNR in mask | outside max diff | prompt followed "
        "| bytes per template |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in systems.items():
        cells = [f"{row[column]:.4g}" for column in _COLUMNS]
        size = row.get("bytes_per_template")
        cells.append(f"{size / 2**20:.2f} MiB" if size else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(systems: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """PSNR inside the mask over bytes per template, a line per kind and format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups: dict[str, list[tuple[float, float, str]]] = {}
    for name, row in systems.items():
        if "bytes_per_template" in row:
            label, _, stride = name.rpartition("-stride")
            point = (row["bytes_per_template"] / 2**20, row["psnr_in_mask"], stride)
            groups.setdefault(label, []).append(point)
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for label, points in groups.items():
        points = sorted(set(points))
        axes.plot([p[0] for p in points], [p[1] for p in points], "o-", label=label, markersize=4)
        for x, y, stride in points:
            axes.annotate(stride, (x, y), textcoords="offset points", xytext=(3, 4), fontsize=7)
    for name in ("masked_tokens_alone", "first_block_cache"):
        if name in systems:
            axes.axhline(systems[name]["psnr_in_mask"], linestyle=":", linewidth=1, color="grey")
            axes.annotate(
                name.replace("_", " "),
                (axes.get_xlim()[0], systems[name]["psnr_in_mask"]),
                fontsize=7,
                textcoords="offset points",
                xytext=(2, 2),
            )
    axes.axhline(30, linestyle="--", linewidth=1, color="black")
    axes.set_xscale("log")
    axes.set_xlabel("MiB per template (labels: anchor stride)")
    axes.set_ylabel("PSNR inside the mask against diffusers, dB")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_sheet(
    edits: Sequence[Edit], pictures: Mapping[str, Sequence[Picture]], path: Path, count: int = 16
) -> None:
    """The first edits, a row each: source with the mask's outline, then every system."""
    names = ["source", *pictures]
    h, w = edits[0].source.shape[:2]
    count = min(count, len(edits))
    columns = 2  # edits side by side
    rows = -(-count // columns)
    sheet = Image.new("RGB", (columns * len(names) * (w + 4), rows * (h + 16) + 16), "white")
    draw = ImageDraw.Draw(sheet)
    for number in range(count):
        edit = edits[number]
        left = (number % columns) * len(names) * (w + 4)
        top = 16 + (number // columns) * (h + 16)
        tiles = [_outlined(edit), *(made[number] for made in pictures.values())]
        for i, (name, tile) in enumerate(zip(names, tiles, strict=True)):
            sheet.paste(Image.fromarray(tile), (left + i * (w + 4), top))
            if number < columns:
                draw.text((left + i * (w + 4), 2), name[:20], fill="black")
        draw.text((left, top + h + 1), edit.prompt, fill="black")
    sheet.save(path, optimize=True)


def _outlined(edit: Edit) -> Picture:
    inner = edit.mask.copy()
    for axis in (0, 1):
        for shift in (-1, 1):
            inner &= np.roll(edit.mask, shift, axis)
    picture = edit.source.copy()
    picture[edit.mask & ~inner] = (255, 0, 255)
    return picture
