"""Print a markdown table of the bytes that one template takes, by entry kind, format and anchor
stride.

The bytes come from the model's configuration (planning/entry_bytes.py) and the engine's number of
anchors; a test compares them with stored entries.

    python scripts/bench bytes_table
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

from maskserve_benchmarks.published_models import (
    FLUX_DEV,
    FLUX_DEV_FACTS,
    FLUX_DEV_SAMPLER,
    SD21,
    SDXL,
)
from maskserve_benchmarks.reports import table as markdown
from maskserve_common.contracts.keys import anchor_steps
from maskserve_engine.families.flux.adapter import FluxAdapter
from maskserve_engine.families.flux.spec import flux_work
from maskserve_engine.families.unet.spec import unet_work
from maskserve_engine.planning.entry_bytes import FORMATS, entry_bytes

KINDS = ("kv", "h")
TABLE_FORMATS = ("bfloat16", "int8", "int4")
STRIDE = 7
"""Stride of UNets, which holds if `[cache] stride` is not set
(`maskserve_engine.spec.model_spec.anchor_stride`)."""


def flux_dev() -> FluxAdapter:
    """Return an adapter of FLUX.1-dev without weights; the number of anchors does not depend on
    them.
    """
    with torch.device("meta"):
        model = FluxTransformer2DModel(**FLUX_DEV)
    sampler = FlowMatchEulerDiscreteScheduler(**FLUX_DEV_SAMPLER)
    return FluxAdapter(FLUX_DEV_FACTS, model, sampler)


def table(side: int, steps: int, strides: Sequence[int]) -> str:
    """Return the markdown table, in GiB.

    Args:
        side: pixels of the square image.
        steps: number of steps of the schedule that has the anchors.
        strides: strides, one per column.
    """
    work = flux_work(FLUX_DEV, side // 8, side // 8)
    adapter, (tokens,) = flux_dev(), work.tokens
    counts = [len(adapter.anchors(tokens, steps, stride)) for stride in strides]
    rows: list[Sequence[object]] = [["", "anchors", 1, *counts]]
    for kind in KINDS:
        for name in TABLE_FORMATS:
            entry_gib = entry_bytes(work, kind, FORMATS[name]) / 2**30
            cells = (f"{entry_gib * count:.2f}" for count in counts)
            rows.append([kind, name, f"{entry_gib:.2f}", *cells])
    strided = [f"stride {stride}" for stride in strides]
    return markdown(["kind", "format", "per anchor", *strided], rows)


def unet_table(steps: int) -> str:
    """Return the UNets' markdown table, in GiB per anchor, at the default stride and at every step.
    Both halves of a guided step share entries.

    Args:
        steps: number of steps of the schedule.
    """
    default = len(anchor_steps([1 - step / steps for step in range(steps)], STRIDE))
    strides = f"stride {STRIDE}, {default} anchors", f"stride 1, {steps} anchors"
    rows = []
    for name, (config, side) in {"SDXL 1024": (SDXL, 128), "SD 2.1 768": (SD21, 96)}.items():
        work = unet_work(config, side, side, guidance=False)
        for kind in KINDS:
            for fmt in TABLE_FORMATS:
                entry_gib = entry_bytes(work, kind, FORMATS[fmt]) / 2**30
                cells = (f"{entry_gib * count:.2f}" for count in (default, steps))
                rows.append([name, kind, fmt, f"{entry_gib:.3f}", *cells])
    return markdown(["model", "kind", "format", "per anchor", *strides], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--side", type=int, default=1024, help="pixels of the square image")
    parser.add_argument("--steps", type=int, default=28, help="of the default schedule")
    parser.add_argument("--strides", type=int, nargs="+", default=[1, 7, 28])
    args = parser.parse_args()
    print(f"FLUX.1-dev, {args.side}x{args.side}, {args.steps} steps: GiB per template\n")
    print(table(args.side, args.steps, args.strides))
    print(f"\nUNets at their native size, {args.steps} steps: GiB per template\n")
    print(unet_table(args.steps))
    return 0
