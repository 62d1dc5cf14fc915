"""The store: entries in tiers, and the way from there to the rows that read them.

    device    memory_tier.py    whole entries, and the books of what rows hold
    host      folder_tier.py    files on a tmpfs, shared by the host's workers
    disk      folder_tier.py    files
    remote    remote_tier.py    objects under a URL

New entries go to the device at once and to the files behind it. An edit that finds its template
in files has it mapped, and brought nearer, while it queues. The engine's thread asks and never
waits for a file: "not now" is an answer, and the row computes all its tokens until it is not.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from maskserve_core.contracts.entry_key import Anchor
from maskserve_engine.cache.background import Background
from maskserve_engine.cache.entries import PARTS, AnchorEntry
from maskserve_engine.cache.folder_tier import FolderTier
from maskserve_engine.cache.handle import Handle
from maskserve_engine.cache.loader import Load, Loader
from maskserve_engine.cache.memory_tier import MemoryTier
from maskserve_engine.cache.movers import Arrival
from maskserve_engine.cache.remote_tier import RemoteTier
from maskserve_engine.cache.selection import Selection
from maskserve_engine.cache.tier import Held, Note, Tier

_PROBE_S = 30.0
"""How long "not there" of the remote tier is believed."""

LoadName = tuple[str, Anchor, bytes]


@dataclass(slots=True)
class Source:
    """An entry that rows can be served from."""

    entry: AnchorEntry
    tier: str
    came: str
    """Where it was found: that tier is said to have served its first reader."""


@dataclass(slots=True)
class _Shared:
    """A load and how many handles there are of it."""

    load: Load
    source: Source
    booked: int
    users: int = 0


class Store:
    """All tiers of one worker; used by the engine's thread.

    Args:
        memory: of the device.
        folders: tiers in files, the nearest first.
        remote: or None.
        loader: brings entries to the device.
        to_host: an entry as it can be written to files.
        on_change: called on another thread when a template that was fetched or written can be
            read, or when it turned out that it cannot.
    """

    def __init__(
        self,
        memory: MemoryTier,
        folders: Sequence[FolderTier],
        remote: RemoteTier | None,
        loader: Loader,
        on_change: Callable[[str], None] = lambda key: None,
    ) -> None:
        self.memory, self.folders, self.remote, self.loader = memory, folders, remote, loader
        self.on_change = on_change
        self.version = 0
        """Grows when what `held` says has changed."""
        self._near: tuple[Tier, ...] = (memory, *folders)
        self._files = Background("entry files", self._look)
        self._network = Background("remote entries")
        self._shared: dict[LoadName, _Shared] = {}
        self._open: dict[tuple[str, Anchor], Source] = {}
        self._busy: dict[str, int] = {}
        """Fetches and writes under way, by key."""
        self._accounted: Counter[str] = Counter()
        """Bytes that travelled, by the tier in which they were found."""
        self._lost: dict[tuple[str, Anchor], float] = {}
        """Entries that were looked for and are nowhere, and when."""
        self._probed: dict[str, tuple[float, frozenset[Anchor]]] = {}
        """What the remote tier was found to have, and when."""
        self._lock = threading.Lock()
        self._seen: dict[str, Mapping[str, Held]] = {tier.name: {} for tier in folders}
        if folders:
            self._files.submit(self._look)

    def tiers(self) -> list[Tier]:
        """The nearest first."""
        return [self.memory, *self.folders, *([self.remote] if self.remote else [])]

    # Where a template lies.

    def locate(self, key: str, anchors: Iterable[Anchor]) -> str | None:
        """The farthest tier that has to be asked for all these entries; None if some are nowhere.

        What only the remote tier may have is asked of it in the background: none for now.
        """
        missing = set(anchors)
        where = None
        for tier in self._near:
            has = tier.anchors(key) & missing
            if has:
                missing -= has
                where = tier.name
            if not missing:
                return where
        if self.remote is not None:
            asked, known = self._probed.get(key, (-_PROBE_S, frozenset()))
            if missing <= known:
                return self.remote.name
            if time.monotonic() - asked > _PROBE_S:
                self._probed[key] = (time.monotonic(), frozenset())
                self._network.submit(lambda: self._probe(key))
        return None

    def busy(self, key: str) -> bool:
        """Whether the template is being fetched or written."""
        return key in self._busy

    def fetch(self, key: str, anchors: Iterable[Anchor]) -> bool:
        """Have entries ready to be read; True when they are, else `on_change` tells."""
        missing = [a for a in anchors if self._source(key, a) is None]
        if missing and not self.busy(key):
            self._begin(key)
            self._files.submit(lambda: self._fetch(key, missing))
        return not missing

    # What a row reads.

    def request(
        self,
        key: str,
        anchor: Anchor,
        selection: Selection,
        source: Source,
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
        name = (key, anchor, b"" if whole else selection.digest)
        shared = self._shared.get(name)
        if shared is None:
            shared = self._share(source, None if whole else selection, force)
            if shared is None:
                return None
            self._shared[name] = shared
            self._touch(key)
        shared.users += 1
        return Handle(anchor, shared.load, self.loader, selection, lambda: self._release(name))

    def hold(self, key: str, anchor: Anchor) -> Source | None:
        """Keep an entry readable until `let_go`, evicted or not; None: not now."""
        source = self._source(key, anchor)
        if source is None:
            if time.monotonic() - self._lost.get((key, anchor), -_PROBE_S) > _PROBE_S:
                self.fetch(key, [anchor])
        elif source.tier == self.memory.name:
            self.memory.lend(source.entry)
        return source

    def let_go(self, source: Source) -> None:
        if source.tier == self.memory.name:
            self.memory.give_back(source.entry)

    def account(self, handle: Handle) -> tuple[str, int]:
        """(tier, bytes) that have travelled for the handle's load and were not told before; the
        tier is where its entry was found, of the first reader, and where it lies now, of others.
        """
        load = handle.load
        shared = next(each for each in self._shared.values() if each.load is load)
        came, shared.source.came = shared.source.came, shared.source.tier
        moved, load.moved = load.moved, 0
        self._accounted[came] += moved
        return came, moved

    # What comes and goes.

    def put(self, key: str, entry: AnchorEntry, note: Note) -> bool:
        """Keep an entry in every tier that can; False when none is going to."""
        kept = self.memory.put(key, entry, note)
        self.version += 1
        self._lost.pop((key, entry.anchor), None)
        if self.folders or self.remote:
            self._begin(key)
            self._files.submit(lambda: self._write(key, entry, note))
        return kept or bool(self.folders)

    def pin(self, key: str, *, pinned: bool) -> None:
        for tier in self.tiers():
            tier.pin(key, pinned=pinned)

    def evict(self, key: str) -> int:
        """Drop a template from every tier; returns bytes. Rows that run keep what they hold."""
        freed = self.memory.evict(key) + sum(tier.evict(key) for tier in self.folders)
        for name in [name for name in self._open if name[0] == key]:
            del self._open[name]
        self._probed.pop(key, None)
        self.version += 1
        remote = self.remote
        if remote is not None:
            self._network.submit(partial(remote.evict, key))
        self._seen = {
            tier: {k: held for k, held in seen.items() if k != key}
            for tier, seen in self._seen.items()
        }
        return freed

    def held(self) -> dict[str, Mapping[str, Held]]:
        """Templates per tier, by key; of files as a look found them at most a second ago."""
        return {self.memory.name: self.memory.held(), **self._seen}

    def tier_bytes(self) -> dict[str, int]:
        """Bytes per tier; of the device what rows hold, too."""
        sizes = {tier: sum(h.nbytes for h in seen.values()) for tier, seen in self._seen.items()}
        return {self.memory.name: self.memory.nbytes, **sizes}

    def counters(self) -> dict[str, float]:
        """Totals per tier; the name of the tier behind a dot."""
        counters: dict[str, float] = {}
        for tier in self.tiers():
            counters[f"cache_evictions_total.{tier.name}"] = tier.evictions
            counters[f"cache_corrupt_total.{tier.name}"] = tier.corrupt
            counters[f"cache_failures_total.{tier.name}"] = tier.failures
            counters[f"cache_loaded_bytes_total.{tier.name}"] = self._accounted[tier.name]
        return counters

    def settle(self, timeout_s: float = 30.0) -> bool:
        """Wait until what is under way to and from files is done."""
        return self._files.settle(timeout_s)

    def settle_network(self, timeout_s: float = 30.0) -> bool:
        """The same of the remote tier."""
        return self._network.settle(timeout_s)

    def close(self) -> None:
        self.loader.close()
        self._files.close(10.0)
        self._network.close(0.5)

    def leaked(self) -> str:
        """What is held though no row is there to hold it, in words; asked when idle."""
        handles, booked = len(self._shared), self.memory.booked
        return f"{handles} handles, {booked} bytes" if handles or booked else ""

    def check_integrity(self) -> None:
        """Raises AssertionError when something is held that nobody holds. Of an idle store."""
        assert not self._shared, f"handles that were not released: {list(self._shared)}"
        assert self.memory.booked == 0, f"{self.memory.booked} bytes booked for nobody"
        for tier in self._near:
            tier.check_integrity()

    # On the engine's thread.

    def _touch(self, key: str) -> None:
        self.memory.touch(key)
        for tier in self.folders:
            tier.touch(key)

    def _source(self, key: str, anchor: Anchor) -> Source | None:
        entry = self.memory.get(key, anchor)
        if entry is not None:
            return Source(entry, self.memory.name, self.memory.name)
        return self._open.get((key, anchor))

    def _share(self, source: Source, selection: Selection | None, force: bool) -> _Shared | None:
        resident = source.tier == self.memory.name
        if resident and self.loader.mover.reads_device:
            load = Load(source.entry, source.tier, None)
            for block, each in enumerate(source.entry.blocks):
                for part in PARTS:
                    if each.part(part):
                        load.arrive((block, part), Arrival(each.part(part)))
            load.moved = booked = 0
        else:
            load = Load(source.entry, source.tier, selection)
            booked = load.nbytes
            if not self.memory.book(booked, force=force):
                return None
        return _Shared(load, source, booked)

    def _release(self, name: LoadName) -> None:
        shared = self._shared[name]
        shared.users -= 1
        if not shared.users:
            del self._shared[name]
            self.loader.drop(shared.load)
            self.memory.unbook(shared.booked)

    # On the threads in the background.

    def _begin(self, key: str) -> None:
        with self._lock:
            self._busy[key] = self._busy.get(key, 0) + 1

    def _end(self, key: str, sought: Iterable[Anchor] = ()) -> None:
        for anchor in sought:
            if (key, anchor) not in self._open:
                self._lost[key, anchor] = time.monotonic()
        with self._lock:
            self._busy[key] -= 1
            if not self._busy[key]:
                del self._busy[key]
        self.on_change(key)

    def _fetch(self, key: str, anchors: Sequence[Anchor]) -> None:
        try:
            for anchor in anchors:
                self._open_file(key, anchor)
            self._look()
        finally:
            if self.remote is None or all((key, anchor) in self._open for anchor in anchors):
                self._end(key, anchors)
            else:
                self._network.submit(lambda: self._download(key, anchors))

    def _open_file(self, key: str, anchor: Anchor) -> None:
        """Map an entry that lies in files, brought nearer if there is room."""
        for number, tier in enumerate(self.folders):
            entry, note = tier.get(key, anchor), tier.note(key)
            if entry is None or note is None:
                continue
            place = tier
            for nearer in self.folders[:number]:
                if nearer.put(key, entry, note):
                    entry, place = nearer.get(key, anchor) or entry, nearer
                    break
            self._open[key, anchor] = Source(entry, place.name, tier.name)
            return

    def _download(self, key: str, anchors: Sequence[Anchor]) -> None:
        assert self.remote is not None
        try:
            for anchor in anchors:
                if (key, anchor) in self._open:
                    continue
                entry, note = self.remote.get(key, anchor), self.remote.note(key)
                if entry is None or note is None:
                    continue
                for tier in self.folders:
                    tier.put(key, entry, note)
                self._open[key, anchor] = Source(entry, "host", self.remote.name)
        finally:
            self._end(key, anchors)

    def _probe(self, key: str) -> None:
        assert self.remote is not None
        self._probed[key] = (time.monotonic(), self.remote.anchors(key))

    def _write(self, key: str, entry: AnchorEntry, note: Note) -> None:
        remote = self.remote
        try:
            here = self.loader.mover.to_host(entry)
            for tier in self.folders:
                tier.put(key, here, note)
            self._look()
            if remote is not None:
                self._network.submit(partial(remote.put, key, here, note))
        finally:
            self._end(key)

    def _look(self) -> None:
        """See what the files hold now, and let go of what is mapped and is no longer there."""
        seen: dict[str, Mapping[str, Held]] = {tier.name: tier.held() for tier in self.folders}
        if seen != self._seen:
            self._seen = seen
            self.version += 1
        there = {key for seen in self._seen.values() for key in seen}
        for name in [name for name in self._open if name[0] not in there]:
            self._open.pop(name, None)
