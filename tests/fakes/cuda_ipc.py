"""Device memory shared between processes, faked in host memory of one process."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from maskserve_engine.control_link import device_memory
from maskserve_engine.control_link.device_memory import LentBlock, OpenedBlock


class FakeIpc:
    """Replaces CUDA's IPC. Reads count as copied once somebody has waited for them. A place that is
    freed earlier is an error and goes to `mistakes`.

    Args:
        monkeypatch: pytest's.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._blocks: dict[bytes, Tensor] = {}
        self._numbers = itertools.count()
        self._door = threading.Lock()
        self._unread: set[int] = set()
        self.reads = 0
        self.refuses = ""
        """Reason for refusing to open blocks; empty: blocks open."""
        self.wrong = False
        """Whether reads return wrong data."""
        self.mistakes: list[str] = []
        monkeypatch.setattr(device_memory, "_lend", self._lend)
        monkeypatch.setattr(device_memory, "_open", self._open)
        monkeypatch.setattr(torch.cuda, "Event", _Event)
        read, settle, give = OpenedBlock.read, OpenedBlock.settle, LentBlock._add_free

        def reads(block: OpenedBlock, begin: int, *args: Any) -> Tensor:
            with self._door:
                self._unread.add(begin)
                self.reads += 1
            return read(block, begin, *args)

        def settles(block: OpenedBlock) -> None:
            settle(block)
            self.catch_up()

        def lend(block: LentBlock, places: list[tuple[int, int]]) -> None:
            with self._door:
                unread = self._unread & {begin for begin, _ in places}
            self.mistakes += [f"{begin} goes before it is read" for begin in unread]
            give(block, places)

        monkeypatch.setattr(OpenedBlock, "read", reads)
        monkeypatch.setattr(OpenedBlock, "settle", settles)
        monkeypatch.setattr(LentBlock, "_add_free", lend)

    def catch_up(self) -> None:
        """Finish the copies of all reads."""
        with self._door:
            self._unread.clear()

    def _lend(self, nbytes: int, device: torch.device) -> tuple[Tensor, Any]:
        name = b"%d" % next(self._numbers)
        block = self._blocks[name] = torch.empty(nbytes, dtype=torch.uint8)
        return block, (0, name, nbytes, 0, b"counter", 0, b"event", True)

    def _open(self, handle: tuple[Any, ...], device: torch.device) -> Tensor:
        if self.refuses:
            raise RuntimeError(self.refuses)
        block = self._blocks[handle[1]]
        return torch.zeros_like(block) if self.wrong else block


class _Event:
    def record(self) -> None:
        """Record an event; all work is done at once."""

    def synchronize(self) -> None:
        """Wait for the event; all work is done at once."""
