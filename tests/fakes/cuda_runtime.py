"""The CUDA runtime's calls that register memory. It records ranges, and wrong calls raise."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class Runtime:
    """The runtime of a device that reads registered memory, and no other memory that is not pinned.

    Args:
        refuses: error code of every registration; 0: none.
    """

    def __init__(self, refuses: int = 0) -> None:
        self.refuses, self.calls = refuses, 0
        self.ranges: dict[int, int] = {}
        """Address → bytes of each registered range."""
        self.total = 0
        """Number of registrations so far."""
        self._lock = threading.Lock()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        with self._lock:
            self.calls += 1
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
        """Whether all of the tensor is registered."""
        begin, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        with self._lock:
            return any(at <= begin and begin + size <= at + n for at, n in self.ranges.items())


class Passed:
    """An event that has passed, or passes when the test says so."""

    def __init__(self, *, passed: bool = True) -> None:
        self.passes = threading.Event()
        if passed:
            self.passes.set()

    def synchronize(self) -> None:
        assert self.passes.wait(30)


CPU = torch.device("cpu")
