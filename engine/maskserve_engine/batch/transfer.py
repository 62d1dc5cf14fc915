"""Transfers between host memory and the device that the caller does not wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskserve_engine.stages.cpu_threads import one_cpu_thread

_ALIGN = 16
"""Alignment of each packed tensor, in bytes, for the kernels that read it."""


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors on `device`.

    They travel packed, in one asynchronous transfer from pinned memory; work queued on the device
    afterwards sees them.
    """
    if device.type == "cpu":
        return list(tensors)
    ends, total = [], 0
    for tensor in tensors:
        begin = -(-total // _ALIGN) * _ALIGN
        total = begin + tensor.numel() * tensor.element_size()
        ends.append((begin, total))
    packed = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    with one_cpu_thread():  # a second one would be woken for each
        for tensor, (begin, end) in zip(tensors, ends, strict=True):
            if end > begin:
                packed[begin:end].view(tensor.dtype).copy_(tensor.flatten())
    on_device = packed.to(device, non_blocking=True)
    return [
        on_device[begin:end].view(tensor.dtype).view(tensor.shape)
        for tensor, (begin, end) in zip(tensors, ends, strict=True)
    ]


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Run a thread's transfers on a side stream, so that no step waits for them; they are complete
    when the block ends.
    """
    if device.type != "cuda":
        yield
        return
    stream = _side_stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the side stream of a device. All threads share one: torch hands out 32 streams in
    turn, and one of many could be the loader's.
    """
    return torch.cuda.Stream(device)


Tree = TypeVar("Tree")


def moved(tree: Tree, device: torch.device) -> Tree:
    """Return nested dataclasses, tuples and dicts with all tensors moved to `device`, in one
    transfer.
    """
    if device.type == "cpu":
        return tree
    device_tensors = iter(to_device(list(_tensors(tree)), device))
    return mapped(tree, lambda _: next(device_tensors))


def mapped(tree: Tree, change: Callable[[Tensor], Tensor]) -> Tree:

    def rebuild(x: Any) -> Any:
        if isinstance(x, Tensor):
            return change(x)
        if isinstance(x, dict):
            return {key: rebuild(value) for key, value in x.items()}
        if type(x) is tuple:
            return tuple(map(rebuild, x))
        if is_dataclass(x) and not isinstance(x, type):
            return replace(x, **{f.name: rebuild(getattr(x, f.name)) for f in fields(x)})
        return x

    whole: Tree = rebuild(tree)
    return whole


def copy_tensors(to: Tree, source: Tree) -> None:
    """Copy a tree's tensors into another tree's tensors of the same shapes."""
    targets = list(_tensors(to))
    if targets:
        torch._foreach_copy_(targets, list(_tensors(source)))


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for child in tree.values():
            yield from _tensors(child)
    elif type(tree) is tuple:
        for child in tree:
            yield from _tensors(child)
    elif is_dataclass(tree):
        for field in fields(tree):
            yield from _tensors(getattr(tree, field.name))


class HostCopy:
    """Asynchronous host copy of a float32 tensor, as it is when the work queued so far is done.

    One thread makes it and continues at once; another may call `array`, which waits.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._event = tensor, None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def arrived(self) -> bool:
        return self._event is None or self._event.query()

    def array(self) -> NDArray[np.float32]:
        if self._event is not None:
            self._event.synchronize()
        array: NDArray[np.float32] = self._host.numpy()
        return array

    def finite(self) -> bool:
        """Return whether all numbers are finite. Waits as `array` does; the device does no more
        work for it.
        """
        return bool(np.isfinite(self.array()).all())
