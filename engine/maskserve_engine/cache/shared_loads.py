"""Loads that rows share: one per entry and set of tokens, for as long as any row reads it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from maskserve_core.contracts.entry_key import Anchor
from maskserve_engine.cache.entries import PARTS, AnchorEntry
from maskserve_engine.cache.entry_file import Source
from maskserve_engine.cache.handle import Handle
from maskserve_engine.cache.loader import Load, Loader
from maskserve_engine.cache.memory_tier import MemoryTier
from maskserve_engine.cache.movers import Arrival
from maskserve_engine.cache.selection import Selection

_Name = tuple[str, Anchor, bytes]


@dataclass(slots=True)
class _Shared:
    """A load and how many handles there are of it."""

    load: Load
    source: Source
    booked: int
    users: int = 0


class SharedLoads:
    """Hands out holds on entries, and books their bytes.

    Args:
        memory: of the device.
        loader: brings entries there.
    """

    def __init__(self, memory: MemoryTier, loader: Loader) -> None:
        self.travelled: Counter[str] = Counter()
        """Bytes accounted for, by the tier in which they were found."""
        self._memory, self._loader = memory, loader
        self._shared: dict[_Name, _Shared] = {}

    def __len__(self) -> int:
        return len(self._shared)

    def take(
        self,
        key: str,
        anchor: Anchor,
        selection: Selection,
        source: Source,
        *,
        whole: bool,
        force: bool,
    ) -> Handle | None:
        """See `Store.request`."""
        name = (key, anchor, b"" if whole else selection.digest)
        shared = self._shared.get(name)
        if shared is None:
            shared = self._share(source, None if whole else selection, force)
            if shared is None:
                return None
            self._shared[name] = shared
        shared.users += 1
        return Handle(anchor, shared.load, self._loader, selection, lambda: self._release(name))

    def account(self, handle: Handle) -> tuple[str, int]:
        """See `Store.account`."""
        load = handle.load
        shared = next(each for each in self._shared.values() if each.load is load)
        came, shared.source.came = shared.source.came, shared.source.tier
        moved, load.moved = load.moved, 0
        self.travelled[came] += moved
        return came, moved

    def _share(self, source: Source, selection: Selection | None, force: bool) -> _Shared | None:
        entry = source.entry
        on_device = source.tier == self._memory.name and self._loader.mover.reads_device
        if isinstance(entry, AnchorEntry) and on_device:
            load = Load(entry, source.tier, None)
            for block, each in enumerate(entry.blocks):
                for part in PARTS:
                    if each.part(part):
                        load.arrive((block, part), Arrival(each.part(part)))
            load.moved = booked = 0
        else:
            load = Load(source.entry, source.tier, selection)
            booked = load.nbytes
            if not self._memory.book(booked, force=force):
                return None
        return _Shared(load, source, booked)

    def _release(self, name: _Name) -> None:
        shared = self._shared[name]
        shared.users -= 1
        if not shared.users:
            del self._shared[name]
            self._loader.drop(shared.load)
            self._memory.unbook(shared.booked)
