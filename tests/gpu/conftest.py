"""The device of these tests: CUDA, or the CPU if MASKSERVE_GPU_TESTS=cpu asks for a rehearsal."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    if os.environ.get("MASKSERVE_GPU_TESTS") == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", 0)


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """The device of tests of kernels and clocks that only CUDA has."""
    if device.type != "cuda":
        pytest.skip("gpu: needs CUDA's own kernels and clocks")
    return device
