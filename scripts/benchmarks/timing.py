"""Clocks, and what they ran on."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch


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
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return f"{model}, {torch.get_num_threads()} threads"
