"""Tensors of one row in host memory, and their way to the device block by block.

A block's tensors leave the device when the row has computed them. A step that reads them starts the
loads of its first blocks, and each block that it reads starts that of a later one. So the device
holds a few blocks, and the loads run beside the step.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from maskserve_common.contracts.tiers import HOST
from maskserve_engine.base.device_clock import Span
from maskserve_engine.cache.entries import PARTS, Coded
from maskserve_engine.cache.loader import Load, Loader, Part, PartTensors
from maskserve_engine.planning.flops import Floats

BLOCKS_AHEAD = 2
"""Blocks that are loading or wait on the device while one is read."""


def bytes_in_use(nbytes: int, blocks: int) -> int:
    """Return the bytes that the device holds at once of a cache in host memory: the block that is
    read, the one that is written and those ahead.
    """
    return min(nbytes, -(-nbytes * (2 + BLOCKS_AHEAD) // blocks))


class HostMemory:
    """Account of the host memory that rows take.

    Args:
        budget_bytes: most bytes of all rows; 0: rows keep nothing in host memory.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes, self.booked = budget_bytes, 0
        self._lock = threading.Lock()

    def book(self, nbytes: int) -> bool:
        """Reserve bytes; return False if there is no room for them."""
        with self._lock:
            fits = self.booked + nbytes <= self.budget_bytes
            self.booked += nbytes if fits else 0
            return fits

    def unbook(self, nbytes: int) -> None:
        with self._lock:
            self.booked -= nbytes


@dataclass(slots=True)
class _HostBlock:
    """Tensors of a block by part, as `Load` reads them from an entry's block."""

    parts: dict[str, tuple[Coded, ...]] = field(default_factory=dict)

    def part(self, name: str) -> tuple[Coded, ...]:
        return self.parts.get(name, ())


@dataclass(slots=True)
class _HostEntry:
    blocks: tuple[_HostBlock, ...]


class _HostLoad(Load):
    """A load that begins when the copies to the host are done; the loader's thread waits for
    them.
    """

    _copied: torch.cuda.Event | None = None

    def __init__(self, entry: _HostEntry, copied: torch.cuda.Event | None) -> None:
        super().__init__(entry, HOST.name, None)
        self._copied = copied

    def parts(self, block: int, part: str) -> PartTensors:
        if self._copied is not None:
            self._copied.synchronize()
        return super().parts(block, part)


class HostCache:
    """Tensors of one row by part of a block; used by the engine's thread.

    Args:
        memory: account of the host's memory.
        loader: brings tensors to the device.
        blocks: number of blocks.
        stalls: receives the spans in which steps waited for a part.
    """

    def __init__(self, memory: HostMemory, loader: Loader, blocks: int, stalls: list[Span]) -> None:
        self.moved = 0
        """Bytes that steps have read from the host."""
        self._memory, self._loader, self._stalls = memory, loader, stalls
        self._entry = _HostEntry(tuple([_HostBlock() for _ in range(blocks)]))
        self._order: list[Part] = []
        """Parts in the order in which steps read them: as the row has computed them first."""
        self._places: dict[Part, int] = {}
        """Place of each part in that order."""
        self._new: set[Part] = set()
        """Parts that were written since the load began."""
        self._load: _HostLoad | None = None
        self._copied: torch.cuda.Event | None = None
        self._step = 0

    @property
    def nbytes(self) -> int:
        return sum(self._nbytes_of(part) for part in self._order)

    @property
    def lost(self) -> BaseException | None:
        """Why its tensors do not arrive; None: they do."""
        return None if self._load is None else self._load.lost

    def sizes(self) -> Floats:
        """[blocks, len(PARTS)] bytes that a step loads."""
        sizes: Floats = np.zeros((len(self._entry.blocks), len(PARTS)))
        for block, part in self._order:
            sizes[block, PARTS.index(part)] = self._nbytes_of((block, part))
        return sizes

    def put(self, part: Part, tensors: tuple[Coded, ...]) -> tuple[Coded, ...] | None:
        """Copy a part's tensors to host memory and return them there; None: there is no room, and
        the part is as it was.
        """
        growth = sum(coded.nbytes for coded in tensors) - self._nbytes_of(part)
        if not self._memory.book(growth):
            return None
        try:
            copies = tuple([coded.map(_to_host, _to_host) for coded in tensors])
        except RuntimeError:  # the host gives no more pinned memory
            self._memory.unbook(growth)
            return None
        device = tensors[0].data.device
        if device.type == "cuda":
            self._copied = self._copied or torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(device))
        block, name = part
        if part not in self._places:
            self._places[part] = len(self._order)
            self._order.append(part)
        self._entry.blocks[block].parts[name] = copies
        self._new.add(part)
        return copies

    def begin(self, step: int) -> None:
        """Start the loads of a step's first blocks.

        Args:
            step: number of the step, by which loads are ordered.
        """
        self._step = step
        if self._new or self._load is None:
            self._drop()
            self._load = _HostLoad(self._entry, self._copied)
            self._copied = None
            self._new.clear()
        self._loader.ask(self._load, self._order[: 1 + BLOCKS_AHEAD], step)

    def get(self, part: Part) -> tuple[Coded, ...]:
        """Return a part's tensors on the device, and start the loads of the next blocks.

        Raises:
            EntryLost: they do not arrive.
        """
        self.moved += self._nbytes_of(part)
        if self._load is None or part in self._new:
            # A copy on the step's own stream comes behind the one that wrote the part.
            device = self._loader.mover.device

            def back(tensor: Tensor) -> Tensor:
                return tensor.to(device, non_blocking=True)

            block, name = part
            return tuple([coded.map(back, back) for coded in self._entry.blocks[block].part(name)])
        place = self._places[part]
        window = [p for p in self._order[place : place + 1 + BLOCKS_AHEAD] if p not in self._new]
        self._loader.keep_only(self._load, window)
        self._loader.ask(self._load, window, self._step)
        return self._loader.read(self._load, part, self._stalls)

    def clear(self) -> None:
        """Drop all tensors."""
        self._memory.unbook(self.nbytes)
        self._drop()
        for block in self._entry.blocks:
            block.parts.clear()
        self._order.clear()
        self._places.clear()
        self._new.clear()

    def _drop(self) -> None:
        if self._load is not None:
            self._loader.drop(self._load)
            self._load = None

    def _nbytes_of(self, part: Part) -> int:
        block, name = part
        return sum(coded.nbytes for coded in self._entry.blocks[block].part(name))


def _to_host(tensor: Tensor) -> Tensor:
    """Return a copy in pinned memory, made on the current stream; on a CPU a copy."""
    if not tensor.is_cuda:
        return tensor.clone()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
