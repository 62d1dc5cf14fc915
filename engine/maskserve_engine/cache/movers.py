"""How the bytes of an entry get to the device: copied in host memory, or over a CUDA device's link.

Both gather the tokens that a row reads before they travel, so that as few bytes travel as are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskserve_engine.cache.codec import Coded
from maskserve_engine.cache.entries import AnchorEntry
from maskserve_engine.cache.entry_file import FileTensor, StoredCoded

Travelling = tuple[Coded, ...] | tuple[StoredCoded, ...]
"""The tensors of a part, in memory or in a file."""


@dataclass(slots=True)
class Arrival:
    """A part on the device, or on its way there in the device's own order. One stream reads it, the
    model's.
    """

    parts: tuple[Coded, ...]
    event: torch.cuda.Event | None = None
    """Passed when the copy is done; None: nobody has to wait for it, or the stream that reads it
    does already."""

    def ready(self) -> bool:
        return self.event is None or self.event.query()

    def get(self) -> tuple[Coded, ...]:
        """The part, for work of the current stream from here on."""
        if self.event is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self.event)
            for coded in self.parts:
                for tensor in coded.tensors():
                    tensor.record_stream(stream)  # else its memory could be given away too early
            self.event = None  # what that stream does from here on is behind the copy
        return self.parts


class Mover(Protocol):
    """Moves parts to one device; `move` is used by one thread."""

    device: torch.device
    reads_device: bool
    """Whether rows read whole entries on the device as they lie there, and nothing has to move."""

    def to_host(self, entry: AnchorEntry) -> AnchorEntry:
        """The entry in host memory, to be written to a file."""
        ...

    def move(self, parts: Travelling, ids: NDArray[np.int64] | None) -> Arrival:
        """Bring the tokens `ids` (None: all) of some tensors to the device."""
        ...


class HostMover:
    """For a model on the CPU: the device's memory is the host's.

    numpy copies rows on the thread that asks, and lets others run meanwhile; torch would start
    threads of its own that take the cores from the step. What lies in memory is gathered once, as
    what comes from a file is: a row reads it for as many steps as its anchor holds.
    """

    device = torch.device("cpu")
    reads_device = False

    def to_host(self, entry: AnchorEntry) -> AnchorEntry:
        return entry

    def move(self, parts: Travelling, ids: NDArray[np.int64] | None) -> Arrival:
        return Arrival(tuple(coded.map(lambda t: gathered(t, ids)) for coded in parts))


def gathered(
    source: Tensor | FileTensor, ids: NDArray[np.int64] | None, out: Tensor | None = None
) -> Tensor:
    """A copy of the tokens `ids` (None: all) of `source` [tokens, n], into `out` if given.

    Raises:
        OSError: a file that cannot be read any more.
    """
    count = len(source) if ids is None else len(ids)
    if out is None:
        out = torch.empty((count, *source.shape[1:]), dtype=source.dtype)
    if isinstance(source, FileTensor):
        source.read(ids, _raw(out))
        return out
    raw, to = _raw(source), _raw(out)
    if ids is None:
        np.copyto(to, raw)
    else:
        np.take(raw, ids, axis=0, out=to, mode="clip")  # any other mode copies once more
    return out


def _raw(tensor: Tensor) -> NDArray[np.uint8]:
    # [tokens, bytes]: one number per token (a scale) is more than one byte, too.
    raw: NDArray[np.uint8] = (
        (tensor if tensor.dim() > 1 else tensor[:, None]).view(torch.uint8).numpy()
    )
    return raw


class CudaMover:
    """For a model on a CUDA device: a ring of pinned buffers and a stream of its own.

    Tokens are gathered in host memory into a pinned buffer and travel from there without the
    host waiting; a buffer is used again once its copy has left.

    Args:
        device: the model's.
        buffer_bytes: of one pinned buffer.
        buffers: in the ring: one is filled while the others travel.
    """

    reads_device = True

    def __init__(self, device: torch.device, buffer_bytes: int, buffers: int = 3) -> None:
        self.device = device
        self.stream, self._down = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._ring = [
            (torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
            for _ in range(buffers)
        ]
        self._bytes, self._next = buffer_bytes, 0

    def to_host(self, entry: AnchorEntry) -> AnchorEntry:
        """On a stream of its own, behind what the device was asked to compute so far."""

        def down(tensor: Tensor) -> Tensor:
            return tensor.to("cpu")

        def moved(coded: Coded) -> Coded:
            return coded.map(down, down)

        with torch.cuda.device(self.device):
            self._down.wait_stream(torch.cuda.default_stream(self.device))
            with torch.cuda.stream(self._down):
                return AnchorEntry(entry.anchor, tuple(each.each(moved) for each in entry.blocks))

    def move(self, parts: Travelling, ids: NDArray[np.int64] | None) -> Arrival:
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            arrived = tuple(
                coded.map(lambda t: self._travel(t, ids), lambda t: self._travel(t, None))
                for coded in parts
            )
            event = torch.cuda.Event()
            event.record(self.stream)
        return Arrival(arrived, event)

    def _travel(self, source: Tensor | FileTensor, ids: NDArray[np.int64] | None) -> Tensor:
        """Through the ring, a buffer's fill of tokens at a time."""
        count = len(source) if ids is None else len(ids)
        arrived = torch.empty((count, *source.shape[1:]), dtype=source.dtype, device=self.device)
        each = source.nbytes // max(1, len(source))
        step = max(1, self._bytes // max(1, each))
        for begin in range(0, count, step):
            end = min(count, begin + step)
            some = np.arange(begin, end) if ids is None else ids[begin:end]
            buffer, left = self._ring[self._next]
            self._next = (self._next + 1) % len(self._ring)
            left.synchronize()  # the copy that used it last
            shape = (end - begin, *source.shape[1:])
            pinned = buffer[: each * (end - begin)].view(source.dtype).view(shape)
            gathered(source, some, pinned)
            arrived[begin:end].copy_(pinned, non_blocking=True)
            left.record(self.stream)
        return arrived
