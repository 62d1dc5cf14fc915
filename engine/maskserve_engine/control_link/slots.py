"""Memory for tensors that go between a denoiser and a ControlNet service.

On one host a slot is a file in memory: one process writes there, the other reads. Over a network
each end has its own memory, and messages carry the bytes (`network`). Messages (`transport`), each
with the number of its request, say which tensors a slot holds and whether these are complete. In
each direction a row has one slot for its lookahead and two for its steps: one step's tensors are
written while those of the step before are read.
"""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from math import prod
from pathlib import Path

import torch
from torch import Tensor

_ALIGNED = 64
LOOKAHEAD = 2
"""Slot of a row's lookahead."""
SLOTS = 3


def aligned(nbytes: int) -> int:
    """Return the first offset from `nbytes` on at which a tensor may begin."""
    return -(-nbytes // _ALIGNED) * _ALIGNED


class Slot(ABC):
    """Tensors, by their offset."""

    def write(self, offset: int, x: Tensor) -> None:
        """Write a tensor of any device.

        Raises:
            OSError: there is no room for it.
        """
        if x.numel():
            self.room(offset, x.shape, x.dtype).copy_(x)

    @abstractmethod
    def room(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory for a tensor, to be filled.

        Raises:
            OSError: there is no room for it.
        """

    @abstractmethod
    def read(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a view of a tensor.

        Raises:
            OSError: nothing lies there.
        """

    @abstractmethod
    def remove(self) -> None:
        """Remove the slot; views stay valid."""


class SharedSlot(Slot):
    """One file, mapped as far as it is used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        self._removed = False

    def room(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._view(offset, shape, dtype, grow=True)

    def read(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._view(offset, shape, dtype, grow=False)

    def remove(self) -> None:
        self._removed = True
        with suppress(OSError):
            self.path.unlink()

    def _view(
        self, offset: int, shape: tuple[int, ...], dtype: torch.dtype, *, grow: bool
    ) -> Tensor:
        count = prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        mapped = self._mapped(offset + count * dtype.itemsize, grow=grow)
        return torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset).view(shape)

    def _mapped(self, nbytes: int, *, grow: bool) -> mmap.mmap:
        if self._map is None or len(self._map) < nbytes:
            descriptor = os.open(self.path, os.O_RDWR | (os.O_CREAT if grow else 0), 0o600)
            try:
                if grow:  # reserved now: writing to a full tmpfs would kill the process
                    os.posix_fallocate(descriptor, 0, nbytes)
                size = os.fstat(descriptor).st_size
                if size < nbytes:
                    raise OSError(f"{self.path} is shorter than what is to be read of it")
                self._map = mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)
                if self._removed:  # by another thread meanwhile; no process reads it
                    self.remove()
        return self._map


class LocalSlot(Slot):
    """Tensors in memory of this process."""

    def __init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}

    def room(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = self._tensors.get(offset)
        if tensor is None or (tensor.shape, tensor.dtype) != (torch.Size(shape), dtype):
            tensor = self._tensors[offset] = torch.empty(shape, dtype=dtype)
        return tensor

    def read(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = self._tensors.get(offset)
        if tensor is None or (tensor.shape, tensor.dtype) != (torch.Size(shape), dtype):
            raise OSError("what is to be read has not come")
        return tensor

    def remove(self) -> None:
        self._tensors.clear()


class RowSlots:
    """The slots of one row.

    Args:
        slot: makes a slot from its name.
    """

    def __init__(self, slot: Callable[[str], Slot]) -> None:
        self._requests, self._answers = (
            tuple(slot(f"{number}.{way}") for number in range(SLOTS)) for way in ("ask", "answer")
        )

    @classmethod
    def shared(cls, folder: Path, row: str) -> RowSlots:
        """Return slots of the row named `row`, in a folder in memory."""
        return cls(lambda name: SharedSlot(folder / f"{row}.{name}"))

    @classmethod
    def local(cls) -> RowSlots:
        return cls(lambda name: LocalSlot())

    def request(self, slot: int) -> Slot:
        """Return the slot for the input of a step, which the denoiser writes."""
        return self._requests[slot]

    def answer(self, slot: int) -> Slot:
        """Return the slot for residuals, which the service writes."""
        return self._answers[slot]

    def remove(self) -> None:
        for slot in (*self._requests, *self._answers):
            slot.remove()
