"""Residuals that stay in device memory, between processes of one host's GPUs (CUDA's IPC).

A service lends its denoisers one block of its device, which each denoiser opens once; a message
says where in it a residual lies. The residual is complete when the message arrives, since the
service waits for its device first. So no process waits for an event of a process that may have been
killed. A place is reused when its row requests the same slot again, or is closed: by then the
denoiser has read it (`OpenedBlock.settle`). A lost session has not confirmed that, so its places
rest for a while.

If the block cannot be opened, or is full, residuals go by slots. Tried between processes of one
GPU, not of several.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from math import prod
from typing import Any

import msgspec
import torch
from torch import Tensor

_log = logging.getLogger(__name__)
_ALIGNED = 256
_REST_S = 10.0
"""Seconds that places of a lost session rest: longer than a device takes for queued work."""
_ELSEWHERE = "residuals pass host memory: %s"


class Lent(msgspec.Struct, frozen=True):
    """Descriptor with which a denoiser opens the service's block."""

    handle: tuple[int, bytes, int, int, bytes, int, bytes, bool]
    """Torch's handle of the memory (`UntypedStorage._share_cuda_`)."""
    check: bytes
    """The block's first bytes, which detect devices that open one another's memory but read other
    data.
    """


class LentBlock:
    """A service's block. One thread writes; any thread opens and closes rows.

    Raises:
        RuntimeError: the device cannot allocate or share it.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._block, handle = _lend(nbytes, device)
        self.lent = Lent(handle, secrets.token_bytes(_ALIGNED))
        check = torch.frombuffer(bytearray(self.lent.check), dtype=torch.uint8)
        _view(self._block, 0, check.shape, check.dtype).copy_(check)
        self.flush()
        self._free = [(_ALIGNED, nbytes)]
        """Free ranges (begin, end), in order."""
        self._places: dict[str, dict[int, list[tuple[int, int]]]] = {}
        """Places by row and slot."""
        self._resting: list[tuple[float, list[tuple[int, int]]]] = []
        """Ranges that rest, each with the time at which it becomes free."""
        self._lock = threading.Lock()

    def open(self, row: str) -> None:
        with self._lock:
            self._places[row] = {}

    def put(self, row: str, slot: int, x: Tensor) -> int | None:
        """Copy a residual into the block and return its offset; None: there is no room, or the row
        is closed.
        """
        nbytes = -(-max(x.nbytes, 1) // _ALIGNED) * _ALIGNED
        with self._lock:
            self._free_rested()
            fits = (at for at, (begin, end) in enumerate(self._free) if end - begin >= nbytes)
            if row not in self._places or (at := next(fits, None)) is None:
                return None
            begin, end = self._free[at]
            self._free[at] = begin + nbytes, end
            self._places[row].setdefault(slot, []).append((begin, begin + nbytes))
        _view(self._block, begin, x.shape, x.dtype).copy_(x)
        return begin

    def flush(self) -> None:
        """Wait until all residuals that were put are written."""
        _flush(self._block.device)

    def clear(self, row: str, slot: int) -> None:
        """Free the slot's places: its residuals have been read."""
        with self._lock:
            self._add_free(self._places.get(row, {}).pop(slot, []))

    def close(self, row: str, *, read: bool) -> None:
        """Forget a row; `read`: its denoiser reads nothing of it any more."""
        with self._lock:
            places = [place for slot in self._places.pop(row, {}).values() for place in slot]
            if read:
                self._add_free(places)
            else:
                self._resting.append((time.monotonic() + _REST_S, places))

    def free(self) -> int:
        with self._lock:
            self._free_rested()
            return sum(end - begin for begin, end in self._free)

    def _free_rested(self) -> None:
        now_s, resting = time.monotonic(), self._resting
        self._resting = [item for item in resting if item[0] > now_s]
        for _, places in (item for item in resting if item[0] <= now_s):
            self._add_free(places)

    def _add_free(self, places: list[tuple[int, int]]) -> None:
        merged: list[tuple[int, int]] = []
        for begin, end in sorted([*self._free, *places]):
            if merged and merged[-1][1] == begin:
                begin = merged.pop()[0]
            merged.append((begin, end))
        self._free = merged


class OpenedBlock:
    """A denoiser's view of the block.

    Args:
        lent: the service's descriptor of the block.

    Raises:
        RuntimeError: it cannot be read from there.
    """

    def __init__(self, lent: Lent, device: torch.device) -> None:
        self._block = _open(lent.handle, device)
        if bytes(self._block[: len(lent.check)].tolist()) != lent.check:
            raise RuntimeError(f"{device} reads something else there")
        self._read = torch.cuda.Event()

    def read(self, begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a copy of a residual, in the order of the device's work."""
        residual = _view(self._block, begin, shape, dtype).clone()
        self._read.record()
        return residual

    def settle(self) -> None:
        """Wait until all reads have been copied; may be called from any thread."""
        self._read.synchronize()


def lent_block(nbytes: int, device: torch.device) -> LentBlock | None:
    """Allocate a service's block; None: none is configured, or it failed and the log says why."""
    try:
        return LentBlock(nbytes, device) if nbytes else None
    except (RuntimeError, ValueError) as error:
        _log.warning(_ELSEWHERE, f"[controls] ipc_bytes: {error}")
        return None


def opened_block(lent: Lent | None, device: torch.device) -> OpenedBlock | None:
    """Open a service's block at a denoiser; None: there is none, or it failed and
    the log says why.
    """
    try:
        return None if lent is None else OpenedBlock(lent, device)
    except (RuntimeError, ValueError) as error:
        _log.warning(_ELSEWHERE, f"the service's device memory cannot be opened: {error}")
        return None


def _view(block: Tensor, begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return block[begin : begin + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _lend(nbytes: int, device: torch.device) -> tuple[Tensor, Any]:
    """Return memory, and torch's handle of it. It is shared once and never freed; torch would count
    its readers to free it.
    """
    if device.type != "cuda":
        raise RuntimeError(f"{device} is not a CUDA device")
    # Segments that grow are shared by file descriptors, which a process accepts only from its
    # children.
    settings = (os.environ.get(f"PYTORCH_{name}", "") for name in ("ALLOC_CONF", "CUDA_ALLOC_CONF"))
    grow = any("expandable_segments:True" in setting for setting in settings)
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    try:
        block = torch.empty(nbytes, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.memory._set_allocator_settings(f"expandable_segments:{grow}")
    return block, block.untyped_storage()._share_cuda_()


def _open(handle: tuple[Any, ...], device: torch.device) -> Tensor:
    """Open the block, even of a device that this process does not see: torch maps it to its own."""
    if device.type != "cuda":
        raise RuntimeError(f"{device} is not a CUDA device")
    view = torch.empty(0, dtype=torch.uint8, device=device)
    return view.set_(torch.UntypedStorage._new_shared_cuda(view.device.index, *handle[1:]))


def _flush(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
