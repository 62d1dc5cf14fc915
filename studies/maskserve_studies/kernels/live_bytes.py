"""The bytes held on a device at once: as CUDA reports them, or counted from the calls of torch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory that operations allocate while entered. Each piece counts once, until it is
    freed.

    Memory that existed before does not count, and neither do a kernel's internal buffers.
    """

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        input_storages = {_storage(t) for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor) and tensor.device.type == self.device:
                self._hold(tensor, input_storages)
        return out

    def _hold(self, tensor: Tensor, input_storages: set[int]) -> None:
        storage, name = tensor.untyped_storage(), _storage(tensor)
        if name in self._known or name in input_storages:
            return
        size = storage.nbytes()
        self._known.add(name)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._release, name, size)

    def _release(self, name: int, size: int) -> None:
        self._known.discard(name)
        self.now -= size


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def peak_bytes(device: torch.device, call: Callable[[], None]) -> int:
    """Return the largest number of bytes that a call adds to the existing memory."""
    if device.type != "cuda":
        live = LiveBytes(device.type)
        with live:
            call()
        return live.peak
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    allocated_before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - allocated_before
