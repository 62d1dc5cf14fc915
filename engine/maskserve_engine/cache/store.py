"""The store: entries in tiers, and their way to the rows that read them.

Rows that read the same tokens of an entry share one load; each row has its own handle. Entries are
written to the device at once (`memory_tier`), and later to files on a tmpfs or a disk
(`folder_tier`) and to objects under a URL (`remote_tier`). If an edit's template is in files, the
store opens it and copies it to a nearer tier while the edit queues. The engine's thread never waits
for a file: if an entry is not ready, the row computes all its tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from maskserve_common.contracts.keys import Anchor, entries_id
from maskserve_engine.base.device_clock import Span
from maskserve_engine.cache.entries import AnchorEntry, Coded
from maskserve_engine.cache.entry_file import EntrySource
from maskserve_engine.cache.folder_tier import FolderTier
from maskserve_engine.cache.host_cache import HostMemory
from maskserve_engine.cache.loader import Arrival, Load, Loader, Part, Selection
from maskserve_engine.cache.lower_tiers import LowerTiers
from maskserve_engine.cache.memory_tier import MemoryTier
from maskserve_engine.cache.remote_tier import RemoteTier
from maskserve_engine.cache.reserve import Block, Reserve
from maskserve_engine.cache.tier import Note, Tier, TierEntry


class Handle:
    """One entry as one row reads it; valid until released.

    Args:
        load: load that the rows with the same tokens share.
        source: source of the load.
        loader: loader of the entry.
        selection: tokens of the row.
        release: called once, when the row releases the handle.
    """

    def __init__(
        self,
        anchor: Anchor,
        load: Load,
        source: EntrySource,
        loader: Loader,
        selection: Selection,
        release: Callable[[], None],
    ) -> None:
        self.anchor, self.load, self.source = anchor, load, source
        self.stalls: list[Span] = []
        """Spans in which steps waited for a part."""
        self.loader, self._selection, self._release = loader, selection, release
        self._released = False

    def want(self, parts: Iterable[Part], step: int) -> None:
        """Load parts for a step; see `Loader.ask`."""
        self.loader.ask(self.load, parts, step)

    def ready(self, block: int, part: str) -> bool:
        """Whether `wait` would return at once."""
        arrival = self.load.arrived.get((block, part))
        return arrival is not None and arrival.ready()

    def wait(self, block: int, part: str) -> tuple[Coded, ...]:
        """Return the row's tokens of a part: (keys, values) of `kv`, one tensor of other PARTS.

        Raises:
            EntryLost: it will not arrive; the row can be stepped without entries.
        """
        parts, ids = self.wait_whole(block, part)
        return parts if ids is None else tuple(coded.take(ids) for coded in parts)

    def wait_whole(self, block: int, part: str) -> tuple[tuple[Coded, ...], Tensor | None]:
        """Return a part in place on the device, and the positions of the row's tokens; None: all.

        Raises:
            EntryLost: as `wait`.
        """
        parts = self.loader.read(self.load, (block, part), self.stalls)
        if self.load.selection is not None:
            return parts, None
        return parts, self._selection.on(block, parts[0].data.device)

    def release(self) -> None:
        """Release the handle; the load ends when no other handle shares it."""
        if not self._released:
            self._released = True
            self._release()


_Name = tuple[str, Anchor, bytes]
"""Template, anchor and digest of the tokens; whole entries have an empty digest."""


@dataclass(slots=True)
class _Shared:
    """A load and the number of its handles."""

    load: Load
    source: EntrySource
    booked: int
    users: int = 0


class Store:
    """All tiers of one worker; used by the engine's thread.

    Args:
        memory: tier on the device.
        folders: tiers in files, the nearest first.
        remote: remote tier; None: there is none.
        loader: loads entries to the device.
        on_change: see `LowerTiers`.
        patience_s: see `LowerTiers`.
        reserve: memory for entries and loads; None: each allocates its own.
        rows: host memory for rows' step caches; None: these stay on the device.
    """

    def __init__(
        self,
        memory: MemoryTier,
        folders: Sequence[FolderTier],
        remote: RemoteTier | None,
        loader: Loader,
        on_change: Callable[[str], None] = lambda key: None,
        patience_s: float = 10.0,
        reserve: Reserve | None = None,
        rows: HostMemory | None = None,
    ) -> None:
        self.rows = rows or HostMemory(0)
        self.memory, self.loader, self.reserve = memory, loader, reserve
        self.lower = LowerTiers(folders, remote, on_change, patience_s)
        self.tiers: tuple[Tier, ...] = (memory, *self.lower.tiers)
        """All tiers, the nearest first."""
        self._shared: dict[_Name, _Shared] = {}
        self._travelled: Counter[str] = Counter()
        """Bytes accounted for, by the tier in which they were found."""
        self._changes = 0
        self.on_evict: Callable[[str], None] = lambda key: None
        """Called with the key of each template that is dropped from every tier."""

    @property
    def version(self) -> int:
        """Grows when the store's templates change."""
        return self._changes + self.lower.version

    # Places of templates.

    def locate(self, key: str, anchors: Iterable[Anchor]) -> str | None:
        """Return the farthest tier that these entries need; None if some are nowhere, as far as
        known.
        """
        missing = set(anchors) - self.memory.anchors(key)
        return self.lower.locate(key, missing) if missing else self.memory.name

    def fetch(self, key: str, anchors: Iterable[Anchor]) -> bool:
        """Prepare entries for reading; return True if they are ready, else call `on_change`."""
        missing = [anchor for anchor in anchors if self._source(key, anchor) is None]
        if missing:
            self.lower.fetch(key, missing)
        return not missing

    # Reads of rows.

    def request(
        self,
        key: str,
        anchor: Anchor,
        selection: Selection,
        source: EntrySource,
        *,
        whole: bool = False,
        force: bool = False,
    ) -> Handle | None:
        """Return a handle of the tokens of one entry; None: it cannot be read now.

        Args:
            key: cache key of the template.
            anchor: anchor of the entry.
            selection: tokens of the row.
            source: the entry, which the row keeps.
            whole: whether to move all tokens, once for all rows that ask so. They are moved too if
                they arrive sooner and there is room.
            force: whether to read the entry even if there is no room.
        """
        self.memory.touch(key)
        self.lower.touch(key)
        if not whole and self.loader.mover.reads_whole(source.entry, selection):
            handle = self._handle(key, anchor, selection, source, whole=True, force=False)
            if handle is not None:
                return handle
        return self._handle(key, anchor, selection, source, whole=whole, force=force)

    def _handle(
        self,
        key: str,
        anchor: Anchor,
        selection: Selection,
        source: EntrySource,
        *,
        whole: bool,
        force: bool,
    ) -> Handle | None:
        """Return a handle of a shared load, which starts with its first handle; see `request`."""
        name = (key, anchor, b"" if whole else selection.digest)
        shared = self._shared.get(name)
        if shared is None:
            shared = self._share(source, None if whole else selection, force)
            if shared is None:
                return None
            self._shared[name] = shared
        shared.users += 1
        load, origin, release = shared.load, shared.source, partial(self._release, name)
        return Handle(anchor, load, origin, self.loader, selection, release)

    def hold(self, key: str, anchor: Anchor) -> EntrySource | None:
        """Keep an entry readable until `let_go`, even if it is evicted; None: it is not ready."""
        source = self._source(key, anchor)
        if source is None:
            if not self.lower.lost(key, anchor):
                self.lower.fetch(key, [anchor])
        elif isinstance(source.entry, AnchorEntry) and source.tier == self.memory.name:
            self.memory.lend(source.entry)
        return source

    def let_go(self, source: EntrySource) -> None:
        if isinstance(source.entry, AnchorEntry) and source.tier == self.memory.name:
            self.memory.give_back(source.entry)

    def account(self, handle: Handle) -> tuple[str, int]:
        """Return (tier, bytes) moved for the handle's load since the last call. For the first
        reader the tier is where the entry was found, for others where it lies now.
        """
        load, source = handle.load, handle.source
        origin_tier, source.found_in = source.found_in, source.tier
        moved, load.moved = load.moved, 0
        self._travelled[origin_tier] += moved
        return origin_tier, moved

    def record_transfer_elsewhere(self, tier: str, nbytes: float) -> None:
        """Count bytes that another process moved to its device from this store's files."""
        self._travelled[tier] += int(nbytes)

    # Writes and evictions.

    def put(self, key: str, entry: AnchorEntry, note: Note) -> bool:
        """Keep an entry in every tier that has room; return False if none has."""
        is_stored = True
        if self.reserve is not None:
            block = self._block(self.reserve, entry.room, frozenset({key}))
            is_stored = block is not None
            entry = entry if block is None else entry.within(block)
        is_stored = is_stored and self.memory.put(key, entry, note)
        self._changes += 1
        self.lower.write(key, entry, note, self.loader.mover.to_host)
        return is_stored or bool(self.lower.folders)

    def pin(self, key: str, *, pinned: bool) -> None:
        self.memory.pin(key, pinned=pinned)
        self.lower.pin(key, pinned=pinned)

    def evict(self, key: str) -> int:
        """Evict a template from every tier; return its bytes. Running rows keep their entries."""
        self._changes += 1
        self.on_evict(key)
        return self.memory.evict(key) + self.lower.evict(key)

    def entries(self) -> dict[str, Mapping[str, TierEntry]]:
        """Templates of each tier, by key; of tiers in files at most a second old."""
        return {self.memory.name: self.memory.entries(), **self.lower.listed}

    def keys_of(self, template_id: str) -> list[str]:
        entries_key = entries_id(template_id)
        keys = {
            key: None
            for templates in self.entries().values()
            for key, template in templates.items()
            if entries_id(template.note.template_id) == entries_key
        }
        return list(keys)

    def tier_bytes(self) -> dict[str, int]:
        """Bytes of each tier; those of the device include rows' bytes."""
        files = {
            t: sum(h.nbytes for h in templates.values())
            for t, templates in self.lower.listed.items()
        }
        return {self.memory.name: self.memory.nbytes, **files}

    def counters(self) -> dict[str, float]:
        """Totals per tier, named `counter.tier`."""
        counters: dict[str, float] = {}
        for tier in self.tiers:
            counters[f"cache_evictions_total.{tier.name}"] = tier.evictions
            counters[f"cache_corrupt_total.{tier.name}"] = tier.corrupt
            counters[f"cache_failures_total.{tier.name}"] = tier.failures
            counters[f"cache_loaded_bytes_total.{tier.name}"] = self._travelled[tier.name]
        return counters

    def settle(self, timeout_s: float = 30.0) -> bool:
        """Wait until file operations under way are done; return False after `timeout_s`."""
        return self.lower.settle(timeout_s)

    def close(self) -> None:
        self.loader.close()
        self.lower.close()

    def check_integrity(self, *, files: bool = True) -> None:
        """Check the accounts of a store that no row reads.

        Args:
            files: whether to check file tiers too, which takes their locks.

        Raises:
            AssertionError: something is still in use, or accounts do not match.
        """
        assert not self._shared, f"{len(self._shared)} loads that were not released"
        assert not self.memory.lent, f"{self.memory.lent} entries lent to nobody"
        assert self.memory.booked == 0, f"{self.memory.booked} bytes booked for nobody"
        assert self.rows.booked == 0, f"{self.rows.booked} bytes of host memory booked for nobody"
        self.memory.check_integrity()
        for tier in self.lower.folders if files else ():
            tier.check_integrity()

    def _source(self, key: str, anchor: Anchor) -> EntrySource | None:
        entry = self.memory.get(key, anchor)
        if entry is not None:
            return EntrySource(entry, self.memory.name, self.memory.name)
        return self.lower.source(key, anchor)

    def _share(
        self, source: EntrySource, selection: Selection | None, force: bool
    ) -> _Shared | None:
        entry = source.entry
        on_device = source.tier == self.memory.name and self.loader.mover.reads_device
        if isinstance(entry, AnchorEntry) and on_device:
            load = Load(entry, source.tier, None)
            for block, block_entry in enumerate(entry.blocks):
                for part, tensors in block_entry.parts.items():
                    load.arrive((block, part), Arrival(tensors))
            load.moved = booked = 0
        else:
            load = Load(source.entry, source.tier, selection)
            booked = load.nbytes
            if not self.memory.book(booked, force=force):
                return None
            if self.reserve is not None:
                load.memory = self._block(self.reserve, load.room, None)
                if load.memory is None and not force:
                    self.memory.unbook(booked)
                    return None
        return _Shared(load, source, booked)

    def _block(self, reserve: Reserve, nbytes: int, keep: frozenset[str] | None) -> Block | None:
        """Take a block of the reserve; evict templates while no free span is long enough. Return
        None if that does not help.

        Args:
            reserve: reserve to take it from.
            nbytes: size of the block.
            keep: keys that must stay while room is made for an entry; None: the block is for a
                load.
        """
        stays = keep is not None
        while True:
            block = reserve.take(nbytes, stays=stays)
            if block is not None or not self.memory.make_way(keep or frozenset()):
                return block

    def _release(self, name: _Name) -> None:
        shared = self._shared[name]
        shared.users -= 1
        if not shared.users:
            del self._shared[name]
            self.loader.drop(shared.load)
            self.memory.unbook(shared.booked)
