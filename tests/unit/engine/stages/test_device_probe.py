"""What a worker's device does at most, asked of it and probed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from maskserve_core.planning.cost_model import H100, estimate
from maskserve_engine import entry_store
from maskserve_engine.cache.loader import Arrival, HostMover, Travelling
from maskserve_engine.entry_store import moved_per_s
from maskserve_engine.stages.device_probe import device_rates, peak_rates, probed
from tests.fakes.jobs import config_of

CPU = torch.device("cpu")


def test_a_probe_times_one_product_and_one_copy() -> None:
    seconds = iter([1e-6, 1e-7])

    def timer(work: Callable[[], object]) -> float:
        work()
        return next(seconds)

    rates = probed(H100, CPU, torch.float32, timer, side=32, copied=1024)
    assert rates.product_flops == pytest.approx(2 * 32**3 / 1e-6)
    assert rates.link_bytes == pytest.approx(1024 / 1e-7)
    model = estimate(rates)
    assert 1 / model.compute.per_unit == pytest.approx(0.67 * rates.product_flops)
    assert 1 / model.loads["host"].per_unit == pytest.approx(rates.link_bytes)


def test_the_way_of_entries_is_tried_as_the_loader_takes_it() -> None:
    moved: list[int] = []

    class Watched(HostMover):
        def move(self, parts: Travelling, ids: Any) -> Arrival:
            arrival = super().move(parts, ids)
            moved.append(sum(coded.data.nbytes for coded in arrival.parts))
            return arrival

    def timer(work: Callable[[], object]) -> float:
        work()
        return 0.5

    assert moved_per_s(Watched(), timer) == 2 * moved[0]
    assert moved[0] == pytest.approx(8 / 9 * 8192 * 3072, rel=1e-3)
    assert moved_per_s(Watched(), lambda work: 0.0) == 0.0


@pytest.mark.parametrize(("tried", "expected"), [(9e9, 9e9), (0.0, H100.link_bytes)])
def test_loads_are_planned_with_what_was_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tried: float, expected: float
) -> None:
    monkeypatch.setattr(entry_store, "device_of", lambda config: torch.device("cuda", 0))
    monkeypatch.setattr(entry_store, "device_rates", lambda config: H100)
    monkeypatch.setattr(entry_store, "CudaMover", lambda device, size: HostMover())
    monkeypatch.setattr(entry_store, "moved_per_s", lambda mover, seconds: tried)
    costs = entry_store.estimated_costs(config_of(tmp_path))
    assert 1 / costs.loads["host"].per_unit == pytest.approx(expected)
    off = entry_store.estimated_costs(config_of(tmp_path, cache={"enabled": False}))
    assert 1 / off.loads["host"].per_unit == pytest.approx(H100.link_bytes)


def test_times_that_say_nothing_leave_what_the_device_says_of_itself() -> None:
    assert probed(H100, CPU, torch.float32, lambda work: 0.0, side=32, copied=1024) == H100


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
