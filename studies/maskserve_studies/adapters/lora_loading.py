"""The time that an edit loses to a LoRA on storage with a second of latency.

The edits are cached edits of FLUX Fill of width 512 with random weights, each with a new LoRA.
`exact` waits for the LoRA before its first step. `fast` begins without it, as far as the LoRA's
profile allows (Katz §6). Here that is half of its steps, which take longer than the storage. Both
are compared with an edit whose LoRA is on the device. Steps of a batch-mate are timed during a load
and without one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import torch
from diffusers import FluxTransformer2DModel
from fsspec.implementations.local import LocalFileSystem
from safetensors.torch import save_file

from maskserve_benchmarks.edits.direct import Direct, Edit
from maskserve_benchmarks.edits.edit import large_model
from maskserve_benchmarks.edits.lora_edits import demo_edits
from maskserve_common.config_file import config_of
from maskserve_engine.base.job import EditJob
from maskserve_engine.families.mmdit.weights import places_of

STORAGE_S = 1.0
_RANK, _STEPS = 16, 40
_UNTIL = 0.5
"""The sigma down to which the profile allows `fast` to run without the LoRA."""


class SlowFiles(LocalFileSystem):  # type: ignore[misc]
    """A folder that takes STORAGE_S to return a file."""

    protocol = ("slow",)

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
        time.sleep(STORAGE_S)
        data: bytes = super().cat_file(path, *args, **kwargs)
        return data


def lora_loading(args: argparse.Namespace) -> dict[str, Any]:
    """Medians over rounds in which all ways take turns."""
    fsspec.register_implementation("slow", SlowFiles, clobber=True)
    with tempfile.TemporaryDirectory() as folder:
        model, loras = large_model(Path(folder) / "model"), Path(folder) / "loras"
        names = _write_loras(model, loras, 3 * args.repeat + 1)
        profiles = Path(folder) / "profiles.json"
        profiles.write_text(json.dumps(dict.fromkeys(names, _UNTIL)), encoding="utf-8")
        store = {"store": f"slow://{loras}", "profiles": str(profiles), "entries": "base"}
        tables = {"model": {"path": str(model), "torch_threads": 1}, "adapters": store}
        worker = Direct(config_of(tables))
        try:
            return _measure(worker, names, args.repeat)
        finally:
            worker.engine.close(grace_s=1.0)


def _measure(worker: Direct, names: Sequence[str], rounds: int) -> dict[str, Any]:
    worker.engine.cache.prompt = lambda: worker.encoder.priming_prompt()
    edit, mate = demo_edits(2)
    loaded_name, *fresh = names

    def job(mode: str, name: str) -> EditJob:
        return _job(worker, edit, {"adapters": mode, "loras": [{"name": name, "scale": 0.8}]})

    for demo_edit in (edit, mate):
        for _ in range(2):  # the second edit of a picture primes it
            worker.run([_job(worker, demo_edit, {})])
    worker.run([job("exact", loaded_name)])
    edit_s: dict[str, list[float]] = {"at hand": [], "fast": [], "exact": []}
    steps: dict[str, list[float]] = {"alone": [], "beside": []}
    for n in range(rounds):
        exact_name, fast_name, concurrent_name = fresh[3 * n : 3 * n + 3]
        loras_by_mode = {
            "at hand": ("exact", loaded_name),
            "fast": ("fast", fast_name),
            "exact": ("exact", exact_name),
        }
        for mode, job_args in loras_by_mode.items():
            edit_s[mode] += worker.run([job(*job_args)])[0][-1:]
        for mode, extra_jobs in (("alone", []), ("beside", [job("exact", concurrent_name)])):
            mate_times = worker.run([_job(worker, mate, {}), *extra_jobs])[0]
            gaps = [b - a for a, b in pairwise(mate_times) if b < STORAGE_S]
            steps[mode].append(statistics.median(gaps))
    seconds = {mode: statistics.median(samples) for mode, samples in edit_s.items()}
    return {
        "lora_at_hand_ms": round(1e3 * seconds["at hand"], 1),
        "lora_fast_added_ms": round(1e3 * (seconds["fast"] - seconds["at hand"]), 1),
        "lora_exact_added_ms": round(1e3 * (seconds["exact"] - seconds["at hand"]), 1),
        "lora_mate_step_ratio": round(
            statistics.median(steps["beside"]) / statistics.median(steps["alone"]), 4
        ),
    }


def _write_loras(model: Path, folder: Path, count: int) -> list[str]:
    """Write random LoRAs of every linear layer of the blocks."""
    folder.mkdir()
    transformer = FluxTransformer2DModel.from_pretrained(model / "transformer")
    places = {n: p.shape for n, p in places_of(transformer).items() if "transformer_blocks" in n}
    names = [f"lora-{number}" for number in range(count)]
    for name in names:
        weights = {}
        for layer, (out, inner) in places.items():
            weights[f"transformer.{layer}.lora_A.weight"] = torch.randn(_RANK, inner) / inner
            weights[f"transformer.{layer}.lora_B.weight"] = torch.randn(out, _RANK) / _RANK
        save_file(weights, folder / f"{name}.safetensors")
    return names


def _job(worker: Direct, edit: Edit, extra_settings: dict[str, Any]) -> EditJob:
    settings = {"seed": 1, "num_inference_steps": _STEPS, "progress": True}
    [job] = worker.jobs([edit], settings | extra_settings)
    return job
