"""The store: entries in tiers, and the way from there to the rows that read them.

    device    memory_tier.py    whole entries, and the books of what rows hold
    host      folder_tier.py    files on a tmpfs, shared by the host's workers
    disk      folder_tier.py    files
    remote    remote_tier.py    objects under a URL

New entries go to the device at once and to the files behind it. An edit that finds its template
in files has it opened, and brought nearer, while it queues. The engine's thread asks and never
waits for a file: "not now" is an answer, and the row computes all its tokens until it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from maskserve_core.contracts.keys import Anchor
from maskserve_engine.cache.entries import AnchorEntry
from maskserve_engine.cache.entry_file import EntrySource
from maskserve_engine.cache.folder_tier import FolderTier
from maskserve_engine.cache.loader import Loader, Selection
from maskserve_engine.cache.lower_tiers import LowerTiers
from maskserve_engine.cache.memory_tier import MemoryTier
from maskserve_engine.cache.remote_tier import RemoteTier
from maskserve_engine.cache.shared_loads import Handle, SharedLoads
from maskserve_engine.cache.tier import Held, Note, Tier


class Store:
    """All tiers of one worker; used by the engine's thread.

    Args:
        memory: of the device.
        folders: tiers in files, the nearest first.
        remote: or None.
        loader: brings entries to the device.
        on_change: of `LowerTiers`, as `patience_s`.
        patience_s: seconds.
    """

    def __init__(
        self,
        memory: MemoryTier,
        folders: Sequence[FolderTier],
        remote: RemoteTier | None,
        loader: Loader,
        on_change: Callable[[str], None] = lambda key: None,
        patience_s: float = 10.0,
    ) -> None:
        self.memory, self.loader = memory, loader
        self.lower = LowerTiers(folders, remote, on_change, patience_s)
        self.tiers: tuple[Tier, ...] = (memory, *self.lower.tiers)
        """The nearest first."""
        self._loads = SharedLoads(memory, loader)
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
        return self._loads.take(key, anchor, selection, source, whole=whole, force=force)

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
        return self._loads.account(handle)

    # What comes and goes.

    def put(self, key: str, entry: AnchorEntry, note: Note) -> bool:
        """Keep an entry in every tier that can; False when none is going to."""
        kept = self.memory.put(key, entry, note)
        self._changes += 1
        self.lower.write(key, entry, note, self.loader.mover.to_host)
        return kept or bool(self.lower.folders)

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
        keys = {
            key: None
            for templates in self.held().values()
            for key, held in templates.items()
            if held.note.template_id == template_id
        }
        return list(keys)

    def tier_bytes(self) -> dict[str, int]:
        """Bytes per tier; of the device what rows hold, too."""
        files = {t: sum(h.nbytes for h in held.values()) for t, held in self.lower.seen.items()}
        return {self.memory.name: self.memory.nbytes, **files}

    def counters(self) -> dict[str, float]:
        """Totals per tier; the name of the tier behind a dot."""
        counters: dict[str, float] = {}
        for tier in self.tiers:
            counters[f"cache_evictions_total.{tier.name}"] = tier.evictions
            counters[f"cache_corrupt_total.{tier.name}"] = tier.corrupt
            counters[f"cache_failures_total.{tier.name}"] = tier.failures
            counters[f"cache_loaded_bytes_total.{tier.name}"] = self._loads.travelled[tier.name]
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
        assert not len(self._loads), f"{len(self._loads)} handles that were not released"
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
