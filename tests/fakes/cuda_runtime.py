"""What of the CUDA runtime registers memory: ranges are written down, and wrong calls raise."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class Runtime:
    """Of a device that reads what is registered, and nothing else that it was not given pinned.

    Args:
        refuses: error that every registration is answered with; 0: none.
    """

    def __init__(self, refuses: int = 0) -> None:
        self.refuses, self.asked = refuses, 0
        self.ranges: dict[int, int] = {}
        """Address → bytes of what is registered now."""
        self.total = 0
        """Ranges that were ever registered."""
        self._lock = threading.Lock()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        with self._lock:
            self.asked += 1
            if self.refuses:
                return self.refuses
            assert nbytes > 0
            for begin, size in self.ranges.items():
                assert address + nbytes <= begin or begin + size <= address, "registered twice"
            self.ranges[address] = nbytes
            self.total += 1
            return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        with self._lock:
            if address not in self.ranges:
                return 713  # cudaErrorHostMemoryNotRegistered
            del self.ranges[address]
            return 0

    def holds(self, tensor: Tensor) -> bool:
        """Whether all of it is registered."""
        begin, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        with self._lock:
            return any(at <= begin and begin + size <= at + n for at, n in self.ranges.items())


class Passed:
    """An event that has passed, or passes when it is told to."""

    def __init__(self, *, passed: bool = True) -> None:
        self.passes = threading.Event()
        if passed:
            self.passes.set()

    def synchronize(self) -> None:
        assert self.passes.wait(30)


CPU = torch.device("cpu")
