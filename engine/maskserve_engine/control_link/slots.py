"""Memory that two processes of one host share: one writes tensors there, the other reads them.

A slot is a file in memory. Nothing in it says what is there, or whether it is there yet: messages
do (`transport`), each with the number of what was asked. A row has two slots each way, so that one
step's tensors are written while those of the step before are read.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

_ALIGNED = 64


def aligned(nbytes: int) -> int:
    """Where in a slot a tensor may begin, at or behind this."""
    return -(-nbytes // _ALIGNED) * _ALIGNED


class Slot:
    """One file, mapped as far as it was needed; views of it outlive its removal."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = None

    def write(self, offset: int, x: Tensor) -> None:
        """Put a tensor of any device there; the file grows as needed.

        Raises:
            OSError: there is no room for it.
        """
        if x.numel():
            self._mapped(offset + x.nbytes, grow=True)
            self.read(offset, x.shape, x.dtype).copy_(x)

    def read(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A view of what lies there.

        Raises:
            OSError: the file is not there, or smaller.
        """
        count = 1
        for n in shape:
            count *= n
        if not count:
            return torch.empty(shape, dtype=dtype)
        mapped = self._mapped(offset + count * dtype.itemsize, grow=False)
        return torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset).view(shape)

    def remove(self) -> None:
        with suppress(OSError):
            self.path.unlink()

    def _mapped(self, nbytes: int, *, grow: bool) -> mmap.mmap:
        if self._map is None or len(self._map) < nbytes:
            opened = os.open(self.path, os.O_RDWR | (os.O_CREAT if grow else 0), 0o600)
            try:
                if grow:  # reserved now: writing to a full tmpfs would kill the process
                    os.posix_fallocate(opened, 0, nbytes)
                size = os.fstat(opened).st_size
                if size < nbytes:
                    raise OSError(f"{self.path} is shorter than what is to be read of it")
                self._map = mmap.mmap(opened, size)
            finally:
                os.close(opened)
        return self._map


class RowSlots:
    """The slots of one row.

    Args:
        folder: in memory.
        row: its name.
    """

    def __init__(self, folder: Path, row: str) -> None:
        self._asks, self._answers = (
            tuple(Slot(folder / f"{row}.{number}.{way}") for number in range(2))
            for way in ("ask", "answer")
        )

    def ask(self, slot: int) -> Slot:
        """Where the denoiser puts what a step is of."""
        return self._asks[slot]

    def answer(self, slot: int) -> Slot:
        """Where the service puts residuals."""
        return self._answers[slot]

    def remove(self) -> None:
        for slot in (*self._asks, *self._answers):
            slot.remove()
