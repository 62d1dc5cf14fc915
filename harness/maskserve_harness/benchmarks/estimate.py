"""What a step should take on a GPU: counted work over the device's published peaks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

import torch

from maskserve_core.models.flux import flux_work
from maskserve_engine.memory import peak_values
from maskserve_harness.benchmarks.kernel_counts import (
    DOUBLE,
    NEEDED,
    SINGLE,
    TABLE,
    Case,
    moved_bytes,
)
from maskserve_harness.benchmarks.step_rig import PRESETS, build_model

PEAK_FLOPS, PEAK_BYTES = 989e12, 3.35e12
"""Of an H100 SXM: bfloat16 without sparsity, and its memory."""


class Step(NamedTuple):
    """Counted work of one step of FLUX.1-dev at 1024x1024, entries in int8 on the device."""

    rows: int
    ratio: float | None
    """Mask ratio of the rows; None: dense ones."""
    flops: float
    needed: int
    """Bytes of products and attention: their kernels move them while they compute."""
    others: int
    """Bytes of all other kernels, which compute next to nothing."""
    launches: int
    held: int
    """Bytes that the memory table counts for so many rows, dense or not."""


def steps() -> Iterator[Step]:
    """By rows and mask ratio; takes a minute."""
    model = build_model("flux-1024", (DOUBLE, SINGLE), torch.bfloat16, torch.device("meta"))
    (down, across), text = PRESETS["flux-1024"]["grid"], PRESETS["flux-1024"]["text"]
    work = flux_work(dict(model.config), 2 * down, 2 * across)
    launches = json.loads(TABLE.read_text(encoding="utf-8"))
    for rows in (1, 4, 8):
        for ratio in (None, 0.05, 0.11, 0.2, 0.35):
            totals = [work.row_at(ratio or 1.0, text)] * rows
            flops = work.step_flops(totals, "kv" if ratio else "dense")
            name = "dense, 4 rows" if rows > 1 else "dense, 1 row"
            if ratio is not None:
                name = f"kv int8, {rows} rows, mixed" if rows > 1 else "kv int8, 1 row"
            moved = moved_bytes(Case(name, (ratio,) * rows))
            needed = sum(moved[group] for group in NEEDED)
            held = 2 * peak_values(work, rows, text)
            others = moved.total() - needed
            yield Step(rows, ratio, flops, needed, others, launches[name]["step"], held)
