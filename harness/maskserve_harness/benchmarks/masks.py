"""Time the way from a decoded mask to edit mask, active tokens and paste weights.

    python scripts/bench masks --json

Reports the median and the worst of several masks: a blob as people draw, a photograph-like
scatter over the whole image, and all white.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import numpy.typing as npt

from maskserve_core.imaging.images import DecodedMask
from maskserve_core.imaging.masks import build_masks
from maskserve_core.imaging.tokens import active_tokens
from maskserve_harness.benchmarks.machine import machine

TOKEN_PIXELS = 16


def masks_of(side: int) -> dict[str, npt.NDArray[np.uint8]]:
    """Luminance [side, side] by name."""
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:side, :side] / side - 0.5
    return {
        "blob": np.where(rows**2 + columns**2 < 0.05, 255, 0).astype(np.uint8),
        "scatter": rng.integers(0, 256, (side, side), dtype=np.uint8),
        "white": np.full((side, side), 255, np.uint8),
    }


def time_mask(
    luminance: npt.NDArray[np.uint8],
    model_side: int,
    dilate: int,
    feather: int,
    repeats: int,
) -> dict[str, float]:
    mask = DecodedMask(luminance, None)
    size = luminance.shape
    model = (model_side, model_side)
    taken = []
    ratio = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        built = build_masks(mask, (size[0], size[1]), model, "auto", dilate, feather)
        active = active_tokens(built.edit, TOKEN_PIXELS)
        ratio = len(active) / (model_side // TOKEN_PIXELS) ** 2
        taken.append((time.perf_counter() - start) * 1e3)
    return {
        "p50_ms": round(float(np.median(taken)), 3),
        "max_ms": round(max(taken), 3),
        "mask_ratio": round(ratio, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", type=int, default=1024, help="side of the source in pixels")
    parser.add_argument("--model-side", type=int, default=1024, help="side the model works at")
    parser.add_argument("--dilate", type=int, default=16, help="pixels of the second round")
    parser.add_argument("--feather", type=int, default=16, help="pixels of the second round")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()

    rounds = {"plain": (0, 0), "dilate_feather": (options.dilate, options.feather)}
    report: dict[str, object] = {
        "side": options.side,
        "model_side": options.model_side,
        "dilate": options.dilate,
        "feather": options.feather,
        "repeats": options.repeats,
        "machine": machine(),
    }
    for name, (dilate, feather) in rounds.items():
        report[name] = {
            kind: time_mask(luminance, options.model_side, dilate, feather, options.repeats)
            for kind, luminance in masks_of(options.side).items()
        }
    if options.json:
        print(json.dumps(report))
        return 0
    for name in rounds:
        for kind, figures in report[name].items():  # type: ignore[attr-defined]
            print(f"{name:15} {kind:8} {figures}")
    return 0
