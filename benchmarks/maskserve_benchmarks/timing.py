"""Clocks for measurements, and the hardware that they ran on."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from maskserve_benchmarks.machine import processor

T = TypeVar("T")


class Timer:
    """Measures calls; on CUDA it waits until the device is done.

    Args:
        device: the device that runs the calls.
        clock: `wall`, or `cpu`: processor time of this process, summed over its threads; other
            processes hardly change it.
    """

    def __init__(self, device: torch.device, clock: str = "wall") -> None:
        self.device = device
        self._now = {"wall": time.perf_counter, "cpu": time.process_time}[clock]

    def ms(self, call: Callable[[], object]) -> float:
        self._settle()
        begin = self._now()
        call()
        self._settle()
        return 1e3 * (self._now() - begin)

    def in_turn(self, calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
        """Return milliseconds of each call: the median of `rounds` rounds."""
        times = [[self.ms(call) for call in calls] for _ in range(rounds)]
        return [statistics.median(samples) for samples in zip(*times, strict=True)]

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def rates_in_turn(
    sides: Mapping[str, T], rate: Callable[[T], float], rounds: int
) -> dict[str, list[float]]:
    """Return the result of `rate` for each side in each round; the order changes."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in sorted(sides, reverse=bool(number % 2)):
            rates[name].append(round(rate(sides[name]), 3))
    return rates


def hardware(device: torch.device) -> str:
    """Return the device in words, for reports."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor()}, {torch.get_num_threads()} threads"


def forget(path: Path) -> None:
    """Make the page cache drop a file; its pages are clean once it is synced."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
