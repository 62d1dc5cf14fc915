"""The reserve: one piece of a GPU's memory, divided among kept entries and loads.

Torch's allocator keeps freed memory for the stream that it was allocated on, and entries and loads
use different streams. Once the card is full, it gives memory back to the driver, and the whole
device waits. In the reserve, a span that one stream has released is free for the other as soon as
the device is done with it, without a call of the driver (docs/adr/0040-reserve.md).
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

ALIGN = 256
"""Alignment of tensors, in bytes."""


class Block:
    """A span of the reserve, allocated while this object lives.

    Args:
        memory: [bytes] uint8.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory, self._used = memory, 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate the next tensor in it, uninitialised."""
        begin = self._used
        self._used = begin + padded(prod(shape) * dtype.itemsize)
        end = begin + prod(shape) * dtype.itemsize
        assert end <= len(self._memory), "more tensors than the block was taken for"
        return self._memory[begin:end].view(dtype).view(tuple(shape))


@dataclass(slots=True)
class _Span:
    begin: int
    end: int
    events: list[Any] = field(default_factory=list)
    """CUDA events behind the last work on this span that have not passed yet."""


class Reserve:
    """Allocates blocks: for entries from one end, for loads from the other, so that short-lived
    blocks do not lie between long-lived ones.

    One thread allocates blocks; any thread may release them.

    Args:
        nbytes: size of the reserve.
        device: device of the memory.
        loads: stream of loads; None: the device is not a CUDA device. The device's default stream
            writes entries and reads all blocks.
    """

    def __init__(
        self, nbytes: int, device: torch.device, loads: torch.cuda.Stream | None = None
    ) -> None:
        nbytes -= nbytes % ALIGN
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._streams = () if loads is None else (torch.cuda.default_stream(device), loads)
        self._free = [_Span(0, nbytes)] if nbytes else []
        """Free spans by address."""
        self._left: deque[_Span] = deque()
        """Spans released and not free yet. A finalizer may add to it anywhere in the program, even
        in `take`.
        """
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        """Bytes that belong to no block."""
        with self._lock:
            self._collect()
            return sum(span.end - span.begin for span in self._free)

    def take(self, nbytes: int, *, stays: bool) -> Block | None:
        """Allocate a block; None: no free span is long enough. The stream that writes to it waits
        for earlier work on the memory, the host does not.

        Args:
            nbytes: bytes of all its tensors, each `padded`.
            stays: whether it is for a kept entry, not for a load.
        """
        nbytes = max(ALIGN, padded(nbytes))
        with self._lock:
            self._collect()
            order = range(len(self._free)) if stays else range(len(self._free) - 1, -1, -1)
            at = next((i for i in order if self._length(i) >= nbytes), None)
            if at is None:
                return None
            span = self._free[at]
            span.events = [event for event in span.events if not event.query()]
            begin = span.begin if stays else span.end - nbytes
            if stays:
                span.begin += nbytes
            else:
                span.end -= nbytes
            if span.begin == span.end:
                del self._free[at]
            events = list(span.events)
        for event in events:
            self._streams[0 if stays else 1].wait_event(event)
        block = Block(self.memory[begin : begin + nbytes])
        weakref.finalize(block, self._let_go, begin, begin + nbytes).atexit = False
        return block

    def _length(self, at: int) -> int:
        return self._free[at].end - self._free[at].begin

    def _let_go(self, begin: int, end: int) -> None:
        events = []
        for stream in self._streams:
            events.append(torch.cuda.Event())
            events[-1].record(stream)
        self._left.append(_Span(begin, end, events))

    def _collect(self) -> None:
        while self._left:
            new = self._left.popleft()
            at = next(
                (i for i, span in enumerate(self._free) if span.begin >= new.end), len(self._free)
            )
            self._free.insert(at, new)
            for i in (at + 1, at):  # the one behind it, then itself, to the one before
                if 0 < i < len(self._free) and self._free[i - 1].end == self._free[i].begin:
                    joined = self._free.pop(i)
                    self._free[i - 1].end = joined.end
                    waiting = [e for e in joined.events if not e.query()]
                    self._free[i - 1].events += waiting


def padded(nbytes: int) -> int:
    """Return `nbytes` rounded up to what a tensor takes in a block."""
    return -(-nbytes // ALIGN) * ALIGN
