"""Memory that the device holds, against the memory table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from maskserve_benchmarks.steps.step_rig import Bench
from maskserve_engine.families.registry import load_adapter
from maskserve_engine.fitting import memory
from maskserve_studies.kernels.live_bytes import peak_bytes
from tests.fakes.jobs import config_of

SLACK = 2**24
"""Bytes that kernels keep for themselves, cuBLAS's workspace above all."""


@pytest.mark.parametrize("ratios", [(None,), (None,) * 4, (0.1, 0.3), (0.1, None)])
def test_a_step_takes_no_more_than_was_counted(
    device: torch.device, ratios: tuple[float | None, ...]
) -> None:
    on_gpu = device.type == "cuda"
    preset, dtype = ("flux-1024", torch.bfloat16) if on_gpu else ("demo", torch.float32)
    bench = Bench(preset, (1, 1), dtype, device, "int8")
    bench.fill_entry("kv")
    rows = [bench.row(ratio, seed) for seed, ratio in enumerate(ratios)]
    bench.step(rows, "kv")  # kernels take their workspace once
    bench.batch = None
    for row in rows:
        row.step = 0
    measured_bytes = peak_bytes(device, lambda: bench.step(rows, "kv"))
    counted = memory.peak_values(bench.work, len(rows), bench.text) * dtype.itemsize
    assert measured_bytes <= counted + SLACK
    if set(ratios) == {None}:  # plain operations take nearly all of it, our kernels two fifths
        assert measured_bytes >= (0.35 if on_gpu else 0.5) * counted


def test_weights_take_what_was_counted(tiny_fill: Path, device: torch.device) -> None:
    config = config_of(tiny_fill, model={"device": str(device)})
    adapters = []
    measured_bytes = peak_bytes(device, lambda: adapters.append(load_adapter(config)))
    assert adapters[0].weight_bytes > 0
    if device.type == "cuda":  # small tensors take 512 bytes each
        assert measured_bytes <= 4 * adapters[0].weight_bytes + SLACK
