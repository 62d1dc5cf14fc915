"""What a worker's device does at most, asked of it and probed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from maskserve_core.planning.cost_model import H100, estimate
from maskserve_engine.stages import device_probe
from maskserve_engine.stages.device_probe import device_rates, peak_rates, probed
from tests.fakes.jobs import config_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_probe, "_SIDE", 32)
    monkeypatch.setattr(device_probe, "_COPIED", 1024)


def test_a_probe_times_one_product_and_one_copy() -> None:
    seconds = iter([1e-6, 1e-7])

    def timer(work: Callable[[], object]) -> float:
        work()
        return next(seconds)

    rates = probed(H100, CPU, torch.float32, timer)
    assert rates.product_flops == pytest.approx(2 * 32**3 / 1e-6)
    assert rates.link_bytes == pytest.approx(1024 / 1e-7)
    model = estimate(rates)
    assert 1 / model.compute.per_unit == pytest.approx(0.67 * rates.product_flops)
    assert 1 / model.loads["host"].per_unit == pytest.approx(rates.link_bytes)


def test_times_that_say_nothing_leave_what_the_device_says_of_itself() -> None:
    assert probed(H100, CPU, torch.float32, lambda work: 0.0) == H100


def test_a_gpu_is_asked_for_its_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(
        name="no such name", multi_processor_count=170, clock_rate=2_407_000, major=12, minor=0
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    rates = peak_rates(torch.device("cuda"), torch.bfloat16)
    assert rates.device == "no such name"
    assert rates.product_flops == pytest.approx(419e12, rel=0.01)


def test_a_cpu_counts_its_threads(tmp_path: Path) -> None:
    one = device_rates(config_of(tmp_path, model={"torch_threads": 1}))
    four = device_rates(config_of(tmp_path, model={"torch_threads": 4}))
    assert four.product_flops == 4 * one.product_flops
