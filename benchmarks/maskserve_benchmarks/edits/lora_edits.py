"""Edits per second of the demo model with LoRAs: any mix in a batch, and one LoRA per batch.

Sixteen cached edits arrive at once, two for each of eight LoRAs. *One per batch* is a server that
has one adapter at a time: it serves the edits of one LoRA before those of the next. The LoRAs are
the demo model's two, each four times with other scales of its weights. `plain_vs_pairs` is the gain
of larger batches by themselves: all edits at once over two at a time, without LoRAs.
`lora_edits_count` is the ratio that the FLOPs of the steps alone allow.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.torch import save_file

from maskserve_benchmarks.checkout import CHECKOUT, DEMO_MODEL
from maskserve_benchmarks.demo_model.scenes import held_out_edits
from maskserve_benchmarks.edits.direct import Direct, Edit
from maskserve_common.config_file import config_of
from maskserve_common.imaging.images import encode_png
from maskserve_engine.base.job import EditJob
from maskserve_engine.requests.execution_plan import EditWork
from maskserve_lora.lora_header import by_module

LORAS, EDITS = 8, 16
_DEMO_LORAS = ("hollow", "ninth-colour")


def lora_edits(args: argparse.Namespace) -> dict[str, Any]:
    """Return medians over rounds in which the ways to batch take turns."""
    with tempfile.TemporaryDirectory() as folder:
        names = write_loras(Path(folder))
        config = config_of(
            {
                "model": {"path": str(DEMO_MODEL), "torch_threads": 1},
                "adapters": {"store": folder},
                "cache": {"dense_above_ratio": 1.0},
            }
        )
        worker = Direct(config)
        try:
            worker.engine.cache.prompt = lambda: worker.encoder.priming_prompt()
            edits = demo_edits(EDITS)
            plain = [_job(worker, n, edit, None) for n, edit in enumerate(edits)]
            mixed = [_job(worker, n, edit, names[n % LORAS]) for n, edit in enumerate(edits)]
            batchings = {
                "none": [plain],
                "mixed": [mixed],
                "one": [mixed[n::LORAS] for n in range(LORAS)],
                "pairs": [plain[n::LORAS] for n in range(LORAS)],
            }

            def serve(batches: Sequence[Sequence[EditJob]]) -> None:
                """Serve the batches one after the other."""
                for jobs in batches:
                    worker.run(jobs)

            flop_ratios = [
                _flop_ratio(worker, mixed[n], Path(folder, f"{names[n]}.safetensors"))
                for n in range(LORAS)
            ]
            for _ in range(2):  # a template's second edit with its LoRA primes it
                for batches in batchings.values():
                    serve(batches)
            times: dict[str, list[float]] = {batching: [] for batching in batchings}
            for _ in range(args.repeat):
                for batching, batches in batchings.items():
                    clock = time.process_time if args.clock == "cpu" else time.perf_counter
                    begin = clock()
                    serve(batches)
                    times[batching].append(clock() - begin)
        finally:
            worker.engine.close(grace_s=1.0)
    seconds = {batching: statistics.median(samples) for batching, samples in times.items()}
    return {
        "lora_edits_per_second": round(EDITS / seconds["mixed"], 2),
        "lora_edits_ratio": round(seconds["none"] / seconds["mixed"], 3),
        "lora_edits_count": round(statistics.mean(flop_ratios), 3),
        "lora_vs_one_per_batch": round(seconds["one"] / seconds["mixed"], 3),
        "plain_vs_pairs": round(seconds["pairs"] / seconds["none"], 3),
    }


def _flop_ratio(worker: Direct, job: EditJob, file: Path) -> float:
    """Return the FLOPs of an edit's cached step over those of the same step with a LoRA."""
    with safe_open(file, "pt") as opened:
        layers = {
            module: sum(opened.get_tensor(name).numel() for name in (names.down, names.up))
            for (_, module), names in by_module(opened.keys())[0].items()
        }
    without = EditWork.of(job, worker.engine.adapter)
    with_lora = without.with_loras([without.model.lora_work(layers)])
    return without.cached_flops / with_lora.cached_flops


def write_loras(folder: Path) -> list[str]:
    """Write `LORAS` LoRAs of the demo model to `folder` and return their names."""
    names = []
    for number in range(LORAS):
        adapter_file = (
            CHECKOUT
            / "assets"
            / "adapters"
            / f"{_DEMO_LORAS[number % len(_DEMO_LORAS)]}.safetensors"
        )
        with safe_open(adapter_file, "pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        scaled = {name: weight * (1.0 - number / 100) for name, weight in weights.items()}
        names.append(f"lora-{number}")
        save_file(scaled, folder / f"{names[-1]}.safetensors", metadata)
    return names


def demo_edits(count: int) -> list[Edit]:
    """Return `count` edits, each with its own picture."""
    return [
        (
            encode_png(demo_edit.source),
            encode_png(np.where(demo_edit.mask, np.uint8(255), np.uint8(0))),
            demo_edit.prompt,
        )
        for demo_edit in held_out_edits(count)
    ]


def _job(worker: Direct, number: int, edit: Edit, lora: str | None) -> EditJob:
    lora_settings = {} if lora is None else {"loras": [{"name": lora, "scale": 0.8}]}
    settings = {"seed": 1, "cache": "require", "request_id": str(number), **lora_settings}
    [job] = worker.jobs([edit], settings)
    return job
