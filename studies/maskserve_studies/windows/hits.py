"""Edits of one photograph at random places: how many read a template, how long they denoise, and
how sharp their windows are.

The photograph is twice as long as the demo model's pictures, and each mask covers a ninth of it.
The edits run one after the other, in three ways: in windows, on the whole photograph, and on the
photograph at the model's size. Each way has an engine without templates, which first runs the same
masks on another photograph, so that no shape is new to it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from PIL import Image

from maskserve_benchmarks.demo_model.palette import COLOURS, SHAPES
from maskserve_benchmarks.demo_model.scenes import PHOTOS
from maskserve_benchmarks.edits.direct import Direct, Edit
from maskserve_common.config_file import config_of
from maskserve_common.contracts.settings import CropMode
from maskserve_common.imaging.images import encode_png
from maskserve_engine.base.job import EditJob

EDITS: Final = 20
_LARGER: Final = 2
"""Side of the photograph, in sides of the model's pictures."""
_MASK: Final = 1 / 3
"""Side of a mask, in sides of the photograph."""


class Way(NamedTuple):
    """How the photograph is sent."""

    crop: CropMode
    larger: int
    """Side of the photograph, in sides of the model's pictures."""


WAYS: Final = {
    "windows": Way("auto", _LARGER),
    "whole": Way("off", _LARGER),
    "model's size": Way("auto", 1),
}


def measure(model: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Return the figures of each way; seconds are medians of the rounds."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, way in WAYS.items():
            runs[name].append(_run(model, way))
    return {name: _median(figures) for name, figures in runs.items()}


def _run(model: str, way: Way) -> dict[str, Any]:
    server = Direct(config_of({"model": {"path": model, "device": "cpu"}}))
    other, photo = sorted(PHOTOS.glob("*.jpg"))[:2]
    try:
        side = server.spec.native_resolution
        for edit in edits(other, side, way):
            _denoise(server, edit, way)
        before = _primed(server)
        done = [_denoise(server, edit, way) for edit in edits(photo, side, way)]
        primed = _primed(server) - before
    finally:
        server.engine.close(grace_s=1.0)
    jobs, metas, cpu_s = zip(*done, strict=True)
    return {
        "hits": sum(meta["cache"] == "hit" for meta in metas),
        "windows": len({job.request.window for job in jobs}),
        "primed": primed,
        "scale": round(statistics.fmean(_scale(job) for job in jobs), 3),
        "tokens_per_step": round(
            sum(meta["computed_tokens"] for meta in metas) / sum(meta["steps"] for meta in metas)
        ),
        "wait_s": sum(meta["timings_ms"]["queue"] for meta in metas) / 1e3,
        "denoise_s": sum(meta["timings_ms"]["denoise"] for meta in metas) / 1e3,
        "cpu_s": sum(cpu_s),
    }


def edits(photo: Path, native: int, way: Way) -> Iterator[Edit]:
    """Yield the edits of a photograph; the masks are the same in all ways."""
    side = native * way.larger
    with Image.open(photo) as opened:
        least = min(opened.size)
        square = opened.convert("RGB").crop((0, 0, least, least))
    source = encode_png(np.asarray(square.resize((side, side), Image.Resampling.LANCZOS)))
    rng = np.random.default_rng(0)
    for number in range(EDITS):
        mask = np.zeros((side, side), np.uint8)
        rows, columns = (
            slice(round(at * side), round((at + _MASK) * side))
            for at in rng.uniform(0.0, 1.0 - _MASK, 2)
        )
        mask[rows, columns] = 255
        colour, shape = list(COLOURS)[number % len(COLOURS)], SHAPES[number % len(SHAPES)]
        yield source, encode_png(mask), f"a {colour} {shape}"


def _denoise(server: Direct, edit: Edit, way: Way) -> tuple[EditJob, dict[str, Any], float]:
    """Denoise an edit; return its job, its META, and the seconds of processor time that it and the
    priming before it take.
    """
    [job] = server.jobs([edit], {"seed": 0, "crop_to_mask": way.crop})
    began = time.process_time()
    meta = server.denoise(job).meta
    return job, meta, time.process_time() - began


def _primed(server: Direct) -> int:
    """Return the number of templates that the engine has primed."""
    cache = server.engine.cache
    return server.engine.ask(lambda: cache.primed).result()


def _scale(job: EditJob) -> float:
    """Model pixels per pixel of the picture, along a side."""
    request = job.request
    return math.sqrt(math.prod(request.model_size) / math.prod(request.view_size))


def _median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = {
        key: round(statistics.median(run[key] for run in runs), 2)
        for key in ("wait_s", "denoise_s", "cpu_s")
    }
    return {**runs[0], **seconds, "hits": [run["hits"] for run in runs]}
