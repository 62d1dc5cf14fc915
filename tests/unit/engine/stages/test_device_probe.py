"""Peak rates of a worker's device, by its properties and by a probe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from maskserve_engine.cache.entry_file import OpenFile
from maskserve_engine.cache.loader import Arrival, CudaMover, HostMover, LinkRates, PartTensors
from maskserve_engine.cache.registered import Registrar
from maskserve_engine.fitting import entry_store
from maskserve_engine.fitting.entry_store import measure_rates
from maskserve_engine.planning.cost_model import H100, estimate
from maskserve_engine.planning.cost_profile import CostProfile
from maskserve_engine.planning.degree_costs import ExchangeCosts
from maskserve_engine.stages.device_probe import device_rates, peak_rates, probed
from tests.fakes.cuda_runtime import Runtime
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


class Watched(HostMover):
    """Writes down what travels."""

    def __init__(self) -> None:
        self.rates = LinkRates()
        self.moved: list[int] = []
        self.refuses = False

    def register(self, file: OpenFile) -> None:
        if not self.refuses:
            file.registered = Registrar(CPU, Runtime()).register(file.descriptor, file.nbytes)

    def move(self, parts: PartTensors, ids: NDArray[np.int64] | None) -> Arrival:
        arrival = super().move(parts, ids)
        self.moved.append(arrival.parts[0].data.nbytes)
        return arrival


def rates_of(mover: Watched, took: float, *, direct: bool) -> LinkRates:
    def timer(work: Callable[[], object]) -> float:
        work()
        return took

    return measure_rates(cast(CudaMover, mover), timer, direct=direct)


def test_both_ways_of_entries_are_tried_as_the_loader_takes_them() -> None:
    mover = Watched()
    rates = rates_of(mover, 0.5, direct=True)
    assert mover.moved == [pytest.approx(8 / 9 * 8192 * 3072, rel=1e-3)] * 2
    assert rates.gathered == 2 * mover.moved[0]
    assert rates.direct == pytest.approx(2 * 8192 * 3072)  # whole tensors travel
    assert rates.best(8 / 9) == pytest.approx(rates.gathered, rel=1e-3)
    assert LinkRates(10e9, 50e9).best(0.5) == 25e9
    assert LinkRates(10e9, 50e9).best(0.1) == 10e9


def test_a_way_that_is_not_there_has_no_rate() -> None:
    mover = Watched()
    assert rates_of(mover, 0.5, direct=False).direct == 0.0
    assert len(mover.moved) == 1
    mover.refuses = True
    assert rates_of(mover, 0.5, direct=True).direct == 0.0


def test_times_that_say_nothing_leave_what_is_assumed() -> None:
    assert rates_of(Watched(), 0.0, direct=True) == LinkRates()
    assert rates_of(Watched(), 0.0, direct=False) == LinkRates(direct=0.0)


def test_loads_are_planned_with_the_better_way(tmp_path: Path) -> None:
    mover = object.__new__(CudaMover)
    mover.rates = LinkRates(9e9, 18e9)
    costs = entry_store.estimated_costs(config_of(tmp_path), mover, H100)
    assert 1 / costs.loads["host"].per_unit == pytest.approx(18e9 * 8 / 9, rel=1e-3)
    off = entry_store.estimated_costs(config_of(tmp_path, cache={"enabled": False}), mover, H100)
    assert 1 / off.loads["host"].per_unit == pytest.approx(H100.link_bytes)


def test_a_profile_of_another_device_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "costs.json"
    costs = estimate(replace(H100, step_share=0.25))
    file.write_text(CostProfile(costs, ExchangeCosts(1e9, 1e-5)).text(), encoding="utf-8")
    config = config_of(tmp_path, engine={"costs": str(file)})
    assert entry_store.estimated_costs(config, rates=H100).compute == costs.compute
    assert not caplog.records
    h100 = replace(H100, device="another card")
    assert entry_store.estimated_costs(config, rates=h100).compute == costs.compute
    assert f"was measured on {H100.device}, and this is another card" in caplog.text


def test_times_that_say_nothing_leave_what_the_device_says_of_itself() -> None:
    assert probed(H100, CPU, torch.float32, lambda work: 0.0, side=32, copied=1024) == H100


def test_a_gpu_is_asked_for_its_properties() -> None:
    device_properties = SimpleNamespace(
        name="no such name", multi_processor_count=170, clock_rate=2_407_000, major=12, minor=0
    )
    rates = peak_rates(
        torch.device("cuda"), torch.bfloat16, properties=lambda device: device_properties
    )
    assert rates.device == "no such name"
    assert rates.product_flops == pytest.approx(419e12, rel=0.01)


def test_a_cpu_counts_its_threads(tmp_path: Path) -> None:
    one = device_rates(config_of(tmp_path, model={"torch_threads": 1}))
    four = device_rates(config_of(tmp_path, model={"torch_threads": 4}))
    assert four.product_flops == 4 * one.product_flops
