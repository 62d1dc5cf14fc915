"""Between host memory and the device, both ways, without waiting for it."""

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
"""Bytes that each tensor's beginning is a multiple of, as kernels like it."""


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The same tensors on `device`.

    To another device they go packed, in one transfer from pinned memory that nobody waits for; what
    is queued on the device afterwards finds them there.

    Args:
        tensors: in host memory, of any shapes and dtypes.
        device: where they shall be.
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
def beside(device: torch.device) -> Iterator[None]:
    """For a thread that brings something to the device beside the steps: what it asks for is done
    when this ends, and no step has waited for it.
    """
    if device.type != "cuda":
        yield
        return
    stream = _beside(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


@cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    """One for all: torch has 32 and gives them out in turn, so that of many some would be the
    loader's own.
    """
    return torch.cuda.Stream(device)


Tree = TypeVar("Tree")


def moved(tree: Tree, device: torch.device) -> Tree:
    """Dataclasses, tuples and mappings, nested, with every tensor in them on `device`: in one
    transfer (`to_device`).
    """
    if device.type == "cpu":
        return tree
    device_tensors = iter(to_device(list(_tensors(tree)), device))
    return mapped(tree, lambda _: next(device_tensors))


def mapped(tree: Tree, change: Callable[[Tensor], Tensor]) -> Tree:
    """The same tree with every tensor in it changed, in the order in which they stand."""

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
    """Write a tree's tensors into those of another that has as many, of the same shapes."""
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
    """What a tensor holds once the device has done what it was asked for so far.

    Made by the thread that asks the device, which goes on at once; `array` may be called by another
    one, which waits.

    Args:
        tensor: float32; nothing else writes to it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._event = tensor, None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def arrived(self) -> bool:
        """Whether `array` would return at once."""
        return self._event is None or self._event.query()

    def array(self) -> NDArray[np.float32]:
        """The same numbers in host memory; waits for them."""
        if self._event is not None:
            self._event.synchronize()
        array: NDArray[np.float32] = self._host.numpy()
        return array

    def finite(self) -> bool:
        """Whether all of them are numbers; waits as `array` does, and asks nothing of the device:
        it goes on with its steps.
        """
        return bool(np.isfinite(self.array()).all())
