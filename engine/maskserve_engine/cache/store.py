"""The store: entries in tiers, and the way from there to the rows that read them.

Rows that read the same tokens of an entry share one load of them, for as long as any of them reads
it; each has a handle of its own.

    device    memory_tier.py    whole entries, and the books of what rows hold
    host      folder_tier.py    files on a tmpfs, shared by the host's workers
    disk      folder_tier.py    files
    remote    remote_tier.py    objects under a URL

New entries go to the device at once and to the files behind it. An edit that finds its template
in files has it opened, and brought nearer, while it queues. The engine's thread asks and never
waits for a file: "not now" is an answer, and the row computes all its tokens until it is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from maskserve_common.contracts.keys import Anchor, entries_id
from maskserve_engine.base.device_clock import Span, mark
from maskserve_engine.cache.entries import PARTS, AnchorEntry, Coded
from maskserve_engine.cache.entry_file import EntrySource
from maskserve_engine.cache.folder_tier import FolderTier
from maskserve_engine.cache.loader import Arrival, Load, Loader, Selection, Want
from maskserve_engine.cache.lower_tiers import LowerTiers
from maskserve_engine.cache.memory_tier import MemoryTier
from maskserve_engine.cache.remote_tier import RemoteTier
from maskserve_engine.cache.reserve import Block, Reserve
from maskserve_engine.cache.tier import Held, Note, Tier


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
"""Template, anchor, and which tokens; of whole entries no bytes."""


@dataclass(slots=True)
class _Shared:
    """A load and how many handles there are of it."""

    load: Load
    source: EntrySource
    booked: int
    users: int = 0


class Store:
    """All tiers of one worker; used by the engine's thread.

    Args:
        memory: of the device.
        folders: tiers in files, the nearest first.
        remote: or None.
        loader: brings entries to the device.
        on_change: of `LowerTiers`, as `patience_s`.
        patience_s: seconds.
        reserve: of the device's memory, for entries and loads; None: they take what they need.
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
    ) -> None:
        self.memory, self.loader, self.reserve = memory, loader, reserve
        self.lower = LowerTiers(folders, remote, on_change, patience_s)
        self.tiers: tuple[Tier, ...] = (memory, *self.lower.tiers)
        """The nearest first."""
        self._shared: dict[_Name, _Shared] = {}
        self._travelled: Counter[str] = Counter()
        """Bytes accounted for, by the tier in which they were found."""
        self._changes = 0
        self.on_evict: Callable[[str], None] = lambda key: None
        """Told the key of each template that is dropped from every tier."""

    @property
    def version(self) -> int:
        """Grows when what `held` says has changed."""
        return self._changes + self.lower.version

    # Where a template lies.

    def locate(self, key: str, anchors: Iterable[Anchor]) -> str | None:
        """The farthest tier that has to be asked for all these entries; None if some are nowhere,
        as far as is known now.
        """
        missing = set(anchors) - self.memory.anchors(key)
        return self.lower.locate(key, missing) if missing else self.memory.name

    def fetch(self, key: str, anchors: Iterable[Anchor]) -> bool:
        """Have entries ready to be read; True when they are, else `on_change` tells."""
        missing = [anchor for anchor in anchors if self._source(key, anchor) is None]
        if missing:
            self.lower.fetch(key, missing)
        return not missing

    # What a row reads.

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
        """A hold on the tokens of one entry; None: not now.

        Args:
            key: of the template.
            anchor: of the entry.
            selection: the row's tokens.
            source: of the entry, held by the row.
            whole: have all tokens travel, once for all rows that ask so.
            force: do not refuse for want of room.
        """
        self.memory.touch(key)
        self.lower.touch(key)
        name = (key, anchor, b"" if whole else selection.digest)
        shared = self._shared.get(name)
        if shared is None:
            shared = self._share(source, None if whole else selection, force)
            if shared is None:
                return None
            self._shared[name] = shared
        shared.users += 1
        return Handle(anchor, shared.load, self.loader, selection, lambda: self._release(name))

    def hold(self, key: str, anchor: Anchor) -> EntrySource | None:
        """Keep an entry readable until `let_go`, evicted or not; None: not now."""
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
        """(tier, bytes) that have travelled for the handle's load and were not told before; the
        tier is where its entry was found, of the first reader, and where it lies now, of others.
        """
        load = handle.load
        shared = next(candidate for candidate in self._shared.values() if candidate.load is load)
        origin_tier, shared.source.came = shared.source.came, shared.source.tier
        moved, load.moved = load.moved, 0
        self._travelled[origin_tier] += moved
        return origin_tier, moved

    def travelled_elsewhere(self, tier: str, nbytes: float) -> None:
        """Bytes that were brought to a device of another process from files of this store's."""
        self._travelled[tier] += int(nbytes)

    # What comes and goes.

    def put(self, key: str, entry: AnchorEntry, note: Note) -> bool:
        """Keep an entry in every tier that can; False when none is going to."""
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
        """Drop a template from every tier; returns bytes. Rows that run keep what they hold."""
        self._changes += 1
        self.on_evict(key)
        return self.memory.evict(key) + self.lower.evict(key)

    def held(self) -> dict[str, Mapping[str, Held]]:
        """Templates per tier, by key; of files as a look found them at most a second ago."""
        return {self.memory.name: self.memory.held(), **self.lower.seen}

    def keys_of(self, template_id: str) -> list[str]:
        """Keys of a template's entries, in whatever tier."""
        entries_key = entries_id(template_id)
        keys = {
            key: None
            for templates in self.held().values()
            for key, template in templates.items()
            if entries_id(template.note.template_id) == entries_key
        }
        return list(keys)

    def tier_bytes(self) -> dict[str, int]:
        """Bytes per tier; of the device what rows hold, too."""
        files = {
            t: sum(h.nbytes for h in templates.values()) for t, templates in self.lower.seen.items()
        }
        return {self.memory.name: self.memory.nbytes, **files}

    def counters(self) -> dict[str, float]:
        """Totals per tier; the name of the tier behind a dot."""
        counters: dict[str, float] = {}
        for tier in self.tiers:
            counters[f"cache_evictions_total.{tier.name}"] = tier.evictions
            counters[f"cache_corrupt_total.{tier.name}"] = tier.corrupt
            counters[f"cache_failures_total.{tier.name}"] = tier.failures
            counters[f"cache_loaded_bytes_total.{tier.name}"] = self._travelled[tier.name]
        return counters

    def settle(self, timeout_s: float = 30.0) -> bool:
        """Wait until what is under way to and from files is done; False if that takes longer."""
        return self.lower.settle(timeout_s)

    def close(self) -> None:
        self.loader.close()
        self.lower.close()

    def check_integrity(self, *, files: bool = True) -> None:
        """Of an idle store.

        Args:
            files: look into them too, which takes their locks.

        Raises:
            AssertionError: something is held that nobody holds, or books do not match.
        """
        assert not self._shared, f"{len(self._shared)} loads that were not released"
        assert not self.memory.lent, f"{self.memory.lent} entries lent to nobody"
        assert self.memory.booked == 0, f"{self.memory.booked} bytes booked for nobody"
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
                for part in PARTS:
                    if block_entry.part(part):
                        load.arrive((block, part), Arrival(block_entry.part(part)))
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
        """Of the reserve; templates are evicted where no span is long enough. None: that did not
        help.

        Args:
            reserve: whose it is.
            nbytes: of it.
            keep: for an entry, which then stays: of its template; None: for a load.
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
