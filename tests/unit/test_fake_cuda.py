"""What a step asks of a CUDA device, counted without one."""

from __future__ import annotations

import json

import pytest
import torch

from maskserve_harness.benchmarks.fake_cuda import DEVICE, FakeCuda
from maskserve_harness.benchmarks.kernel_counts import (
    CASES,
    MIXED,
    TABLE,
    Case,
    count,
    fake_bench,
    steady_steps,
)

COMMITTED = json.loads(TABLE.read_text(encoding="utf-8"))
STEADY = [case for case in CASES if not case.primes]


@pytest.mark.parametrize("case", STEADY, ids=lambda case: case.name)
def test_a_steady_step_copies_nothing_and_waits_for_nothing(case: Case) -> None:
    blocks = (3, 3) if case.kind == "mixed" else (1, 1)
    assert [log.copies for log in steady_steps(case, blocks)] == [[], []]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_step_launches_no_more_kernels_than_the_table_says(case: Case) -> None:
    assert count(case).per_block <= COMMITTED[case.name]["per_block"] + 0.1


def test_who_joins_and_leaves_is_never_waited_for() -> None:
    """Packing anew sends its indices in transfers that the host does not wait for."""
    with FakeCuda() as cuda:
        bench = fake_bench((1, 1), "int8")
        bench.fill_entry("kv")
        rows = [bench.row(ratio, seed) for seed, ratio in enumerate((*MIXED[:3], None))]
        with cuda.watch() as log:
            for batch in (rows[:2], rows[:3], rows, rows[1:], [rows[3]], [rows[0]]):
                bench.step(batch, "kv")
    assert log.launches > 0
    assert [copy for copy in log.copies if "waits" in copy] == []


def test_the_log_sees_what_it_is_there_for() -> None:
    with FakeCuda() as cuda, cuda.watch() as log:
        there = torch.zeros(4, device=DEVICE)
        (there * 2)[1:3].add_(1)
        torch.tensor([1.0, 2.0]).to(DEVICE)
        there.cpu()
        with pytest.raises(Exception, match="device"):
            there + torch.zeros(4)
        with pytest.raises(Exception, match="aten"):
            there.sum().item()
    assert log.kernels == {"zeros.default": 1, "mul.Tensor": 1, "add_.Tensor": 1, "sum.default": 1}
    assert [copy.split(" in ")[0] for copy in log.copies] == ["cpu -> cuda", "cuda -> cpu"]
    assert all("waits" in copy for copy in log.copies)


@pytest.mark.slow
def test_the_whole_model_steps() -> None:
    _, log = steady_steps(Case("all blocks", MIXED[:4]), (19, 38))
    assert log.copies == []
    assert log.launches <= 57 * (COMMITTED["kv int8, 4 rows, mixed"]["per_block"] + 0.1)
