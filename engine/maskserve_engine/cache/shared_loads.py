"""Loads that rows share: one per entry and set of tokens, for as long as any row reads it. Each row
has a handle of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from maskserve_core.contracts.keys import Anchor
from maskserve_engine.cache.entries import PARTS, AnchorEntry, Coded
from maskserve_engine.cache.entry_file import EntrySource
from maskserve_engine.cache.loader import Arrival, Load, Loader, Selection, Want
from maskserve_engine.cache.memory_tier import MemoryTier
from maskserve_engine.device_clock import Span, mark


class Handle:
    """One entry as one row reads it; valid until released.

    Args:
        anchor: of the entry.
        load: shared by the rows that read the same.
        loader: that brings it in.
        selection: the row's own tokens.
        release: told once, when the row lets go.
    """

    def __init__(
        self,
        anchor: Anchor,
        load: Load,
        loader: Loader,
        selection: Selection,
        release: Callable[[], None],
    ) -> None:
        self.anchor, self.load = anchor, load
        self.stalls: list[Span] = []
        """Where steps have waited for a part."""
        self._loader, self._selection, self._release = loader, selection, release
        self._released = False

    def want(self, wants: Iterable[Want], turn: int) -> None:
        """Have parts brought in for a step; see `Loader.ask`."""
        self._loader.ask(self.load, wants, turn)

    def ready(self, block: int, part: str) -> bool:
        """Whether `wait` would return at once."""
        arrival = self.load.arrived.get((block, part))
        return arrival is not None and arrival.ready()

    def wait(self, block: int, part: str) -> tuple[Coded, ...]:
        """The row's own tokens of a part: (keys, values) of `kv`, one of any other of PARTS.

        Raises:
            EntryLost: it will not come; the row can be stepped without entries.
        """
        parts, ids = self.wait_whole(block, part)
        return parts if ids is None else tuple(coded.take(ids) for coded in parts)

    def wait_whole(self, block: int, part: str) -> tuple[tuple[Coded, ...], Tensor | None]:
        """A part as it lies on the device, and which of its tokens are the row's; None: all are.

        Raises:
            EntryLost: as `wait`.
        """
        arrival = self.load.arrived.get((block, part))
        if arrival is not None and arrival.ready():
            parts = arrival.get()
        else:
            begin = mark(self._loader.mover.device)
            parts = (arrival or self._loader.wait(self.load, (block, part))).get()
            self.stalls.append(Span(begin, mark(self._loader.mover.device)))
        if self.load.selection is not None:
            return parts, None
        return parts, self._selection.on(block, parts[0].data.device)

    def release(self) -> None:
        """Let go; what nobody else reads is dropped."""
        if not self._released:
            self._released = True
            self._release()


_Name = tuple[str, Anchor, bytes]


@dataclass(slots=True)
class _Shared:
    """A load and how many handles there are of it."""

    load: Load
    source: EntrySource
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
        source: EntrySource,
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

    def _share(
        self, source: EntrySource, selection: Selection | None, force: bool
    ) -> _Shared | None:
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
