"""Clocks, and what they ran on."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from maskserve_harness.benchmarks.machine import processor


class Timer:
    """Wall time of calls, on CUDA until the device is done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def ms(self, call: Callable[[], None]) -> float:
        self._settle()
        begin = time.perf_counter()
        call()
        self._settle()
        return 1e3 * (time.perf_counter() - begin)

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def hardware(device: torch.device) -> str:
    """The device in words, for reports."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor()}, {torch.get_num_threads()} threads"
