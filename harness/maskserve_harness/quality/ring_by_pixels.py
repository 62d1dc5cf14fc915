"""Is a ring that follows the mask's pixels, and not its tokens, nearer to dense rows per token?

`mask_ring` computes the tokens within so many tokens of an active one, however deep inside its
token the mask ends. Here a token is computed if a masked pixel is within some pixels of it, so that
a mask that ends far from its token's side has no neighbour there. Cached rows of the demo model by
class of edit, against its dense rows, with the tokens that each way computes.

    OMP_NUM_THREADS=1 python scripts/bench ring_by_pixels --n 4 --json ring.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFilter

from maskserve_core.imaging.masks import TokenIds, active_tokens
from maskserve_core.models.facts import ALL_STEPS
from maskserve_engine.families.flux import preparation
from maskserve_harness.benchmarks.timing import hardware
from maskserve_harness.checkout import DEMO_MODEL
from maskserve_harness.demo_model.edit_classes import CLASSES, edits_of
from maskserve_harness.quality.choices import CacheChoice
from maskserve_harness.quality.metrics import Picture, by_class, compare
from maskserve_harness.quality.systems import Rig
from maskserve_harness.reports import about, write_json

PIXELS = (2, 3, 4, 5, 6)
"""Rings of so many; a token of the demo model has eight."""
_BY_PIXELS = 100
"""`mask_ring` that stands for a ring of its excess in pixels."""


def tokens_near(edit: Any, token_pixels: int, ring: int = 0) -> TokenIds:
    """`active_tokens`, for rings of pixels too."""
    if ring < _BY_PIXELS:
        return active_tokens(edit, token_pixels, ring)
    grown = Image.fromarray(edit).filter(ImageFilter.MaxFilter(2 * (ring - _BY_PIXELS) + 1))
    return active_tokens(np.asarray(grown), token_pixels)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--n", type=int, default=4, help="edits of each class")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    preparation.active_tokens = tokens_near  # type: ignore[attr-defined]
    rig = Rig(DEMO_MODEL, args.steps)
    rings = [0, *(_BY_PIXELS + pixels for pixels in PIXELS), 1]
    classes = {name: edits_of(name, args.n) for name in CLASSES if name != "most"}
    dense: dict[str, list[Picture]] = {}
    made: dict[int, dict[str, list[Picture]]] = {ring: {} for ring in rings}
    counts: dict[int, list[int]] = {ring: [] for ring in rings}
    for name, edits in classes.items():
        jobs = rig.jobs(edits)
        dense[name], entries = rig.dense(edits, jobs), rig.entries(jobs)
        for ring in rings:
            choice = CacheChoice("kv", "int4", ALL_STEPS, ring)
            made[ring][name] = rig.cached(edits, jobs, entries, choice)
            size = rig.adapter.facts.token_pixels
            counts[ring] += [len(tokens_near(job.edit_mask, size, ring)) for job in jobs]
    figures = {}
    for ring in rings:
        told = f"{ring} tokens" if ring < _BY_PIXELS else f"{ring - _BY_PIXELS} pixels"
        judged = by_class(
            {name: compare(classes[name], made[ring][name], dense[name]) for name in classes}
        )
        figures[told] = {"active_tokens": round(float(np.mean(counts[ring])), 1), **judged}
        print(told, figures[told], flush=True)
    report = {**about(hardware(torch.device("cpu"))), "steps": args.steps, "rings": figures}
    write_json(report, args.json)
    return 0
