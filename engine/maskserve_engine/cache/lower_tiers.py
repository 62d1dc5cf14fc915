"""The tiers below the device, and their open files.

One thread reads and writes files, another calls the remote tier. The engine's thread never waits
for them: it gets None if an entry is not ready.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from maskserve_common.contracts.keys import Anchor
from maskserve_common.contracts.tiers import HOST
from maskserve_common.lru_cache import LruCache
from maskserve_engine.cache.background import Background
from maskserve_engine.cache.entries import AnchorEntry
from maskserve_engine.cache.entry_file import EntrySource
from maskserve_engine.cache.folder_tier import FolderTier
from maskserve_engine.cache.remote_tier import RemoteTier
from maskserve_engine.cache.tier import Note, TierEntry

ToHost = Callable[[AnchorEntry], AnchorEntry]
_PROBE_S = 30.0
"""Seconds after which a failed search is repeated."""
_UPLOADS = 16
"""Most entries that wait for the network; more are not uploaded."""
_REMEMBERED = 1024
"""Most searches remembered of each kind; the oldest are forgotten."""
_FILES = 2**16
"""Upper bound of open files."""


class LowerTiers:
    """The tiers in files and the remote tier.

    Three threads use it: the engine's, one for files and one for the network. One lock guards their
    shared state; it is never held while a tier or `on_change` is called.

    Args:
        folders: tiers in files, the nearest first.
        remote: remote tier; None: there is none.
        on_change: called on another thread with the key of a template that was fetched or written,
            or that turned out to be unreadable.
        patience_s: seconds after which a remote fetch counts as failed; entries that arrive later
            are kept.
    """

    def __init__(
        self,
        folders: Sequence[FolderTier],
        remote: RemoteTier | None,
        on_change: Callable[[str], None],
        patience_s: float,
    ) -> None:
        self.folders, self.remote, self.on_change = folders, remote, on_change
        self.tiers = (*folders, *((remote,) if remote else ()))
        self._patience_s = patience_s
        self._lock = threading.Lock()
        """Guards all attributes below except the two threads; `version` and `listed` may be read
        without it.
        """
        self.version = 0
        """Grows when `listed` changes."""
        self.listed: dict[str, Mapping[str, TierEntry]] = {tier.name: {} for tier in folders}
        """Templates of each tier in files, by key; at most a second old."""
        self._open: LruCache[tuple[str, Anchor], EntrySource] = LruCache(_most_open_files())
        """Open entries by key and anchor."""
        self._busy: dict[str, int] = {}
        """Number of fetches and writes under way, by key."""
        self._awaited: set[str] = set()
        """Keys being fetched from the remote tier whose patience has not run out."""
        self._lost: LruCache[tuple[str, Anchor], float] = LruCache(_REMEMBERED)
        """Time at which no tier had each entry."""
        self._probed: LruCache[str, tuple[float, frozenset[Anchor]]] = LruCache(_REMEMBERED)
        """Anchors that the remote tier has of each key, and the time of the query."""
        self._files = Background("entry files", self._look)
        self.network = Background("remote entries")
        """Transfers to and from the remote tier."""
        if folders:
            self._files.submit(self._look)

    def locate(self, key: str, anchors: Iterable[Anchor]) -> str | None:
        """Return the farthest tier that these entries need; None if some are nowhere.

        The remote tier is queried in the background: until it answers, the result is None.
        """
        missing = set(anchors)
        for tier in self.folders:
            missing -= tier.anchors(key)
            if not missing:
                return tier.name
        if self.remote is None:
            return None
        with self._lock:
            probed_at, known_anchors = self._probed.get(key) or (-_PROBE_S, frozenset())
            if missing <= known_anchors:
                return self.remote.name
            if time.monotonic() - probed_at <= _PROBE_S:
                return None
            self._probed.put(key, (time.monotonic(), frozenset()))
        self.network.submit(partial(self._probe, key))
        return None

    def busy(self, key: str) -> bool:
        """Whether the template is being fetched or written."""
        with self._lock:
            return key in self._busy

    def source(self, key: str, anchor: Anchor) -> EntrySource | None:
        """Return an open entry; None: it is not open."""
        with self._lock:
            source = self._open.get((key, anchor))
            if source is not None and source.entry.broken:
                self._open.drop((key, anchor))
                return None
            return source

    def lost(self, key: str, anchor: Anchor) -> bool:
        with self._lock:
            lost_at = self._lost.get((key, anchor))
            return lost_at is not None and time.monotonic() - lost_at <= _PROBE_S

    def fetch(self, key: str, anchors: Sequence[Anchor]) -> None:
        """Open entries, and copy them to a nearer tier if it has room; then call `on_change`."""
        with self._lock:
            if key in self._busy:
                return
            self._busy[key] = 1
        self._files.submit(partial(self._fetch, key, anchors))

    def write(self, key: str, entry: AnchorEntry, note: Note, to_host: ToHost) -> None:
        """Write an entry of the device to every lower tier that can keep it; then call `on_change`.
        `to_host` copies the entry to host memory.
        """
        if self.folders or self.remote:
            with self._lock:
                self._lost.drop((key, entry.anchor))
                self._busy[key] = self._busy.get(key, 0) + 1
            self._files.submit(partial(self._write, key, entry, note, to_host))

    def touch(self, key: str) -> None:
        for tier in self.folders:
            self._files.submit(partial(tier.touch, key))

    def pin(self, key: str, *, pinned: bool) -> None:
        for tier in self.tiers:
            tier.pin(key, pinned=pinned)

    def evict(self, key: str) -> int:
        """Evict a template; return the bytes freed in files."""
        freed = sum(tier.evict(key) for tier in self.folders)
        with self._lock:
            self._close({name for name in self._open if name[0] == key})
            self._probed.drop(key)
            self.listed = {
                tier: {k: template for k, template in templates.items() if k != key}
                for tier, templates in self.listed.items()
            }
            self.version += 1
        if self.remote is not None:
            self.network.submit(partial(self.remote.evict, key))
        return freed

    def settle(self, timeout_s: float) -> bool:
        """Wait until file operations under way are done; return False after `timeout_s`."""
        return self._files.settle(timeout_s)

    def close(self) -> None:
        self._files.close(10.0)
        self.network.close(0.5)

    # On the background threads.

    def _end(self, key: str, sought: Iterable[Anchor] = ()) -> None:
        with self._lock:
            for anchor in sought:
                if (key, anchor) not in self._open:
                    self._lost.put((key, anchor), time.monotonic())
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
            is_complete = all(self.source(key, anchor) is not None for anchor in anchors)
            if self.remote is None or is_complete:
                self._end(key, anchors)
            else:
                with self._lock:
                    self._awaited.add(key)
                self.network.submit(partial(self._download, key, anchors))
                patience = threading.Timer(self._patience_s, self._give_up, (key, anchors))
                patience.daemon = True
                patience.start()

    def _give_up(self, key: str, anchors: Sequence[Anchor]) -> None:
        """Let waiting edits go on without a remote fetch that is not done."""
        self._settle(key, anchors, late=True)

    def _settle(self, key: str, anchors: Sequence[Anchor], *, late: bool = False) -> None:
        """Account for a remote fetch once: when it has ended, or when its patience has run out."""
        with self._lock:
            awaited = key in self._awaited
            self._awaited.discard(key)
            if awaited and late:
                self._probed.put(key, (time.monotonic(), frozenset()))
        if awaited:
            self._end(key, anchors)

    def _open_file(self, key: str, anchor: Anchor) -> None:
        for number, tier in enumerate(self.folders):
            entry, note = tier.open(key, anchor), tier.note(key)
            if entry is None or note is None:
                continue
            place = tier
            for nearer in self.folders[:number]:
                if nearer.put(key, entry, note):
                    entry, place = nearer.open(key, anchor) or entry, nearer
                    break
            with self._lock:
                self._open.put((key, anchor), EntrySource(entry, place.name, tier.name))
            return

    def _download(self, key: str, anchors: Sequence[Anchor]) -> None:
        assert self.remote is not None
        try:
            for anchor in anchors:
                if self.source(key, anchor) is not None:
                    continue
                entry, note = self.remote.get(key, anchor), self.remote.note(key)
                if entry is None or note is None:
                    continue
                for tier in self.folders:
                    tier.put(key, entry, note)
                with self._lock:
                    source = EntrySource(entry, HOST.name, self.remote.name)
                    self._open.put((key, anchor), source)
            with self._lock:  # late entries can be found from now on
                _, known_anchors = self._probed.get(key) or (0.0, frozenset())
                downloaded = {anchor for anchor in anchors if (key, anchor) in self._open}
                self._probed.put(key, (time.monotonic(), known_anchors | downloaded))
        finally:
            self._settle(key, anchors)

    def _probe(self, key: str) -> None:
        assert self.remote is not None
        remote_anchors = self.remote.anchors(key)
        with self._lock:
            self._probed.put(key, (time.monotonic(), remote_anchors))

    def _write(self, key: str, entry: AnchorEntry, note: Note, to_host: ToHost) -> None:
        try:
            host_entry = to_host(entry)
            for tier in self.folders:
                tier.put(key, host_entry, note)
            self._look()
            if self.remote is not None and self.network.pending < _UPLOADS:
                self.network.submit(partial(self.remote.put, key, host_entry, note))
        finally:
            self._end(key)

    def _look(self) -> None:
        """List the templates in the file tiers, and close entries of templates that are gone."""
        templates: dict[str, Mapping[str, TierEntry]] = {
            tier.name: tier.entries() for tier in self.folders
        }
        present_keys = {key for by_key in templates.values() for key in by_key}
        with self._lock:
            if templates != self.listed:
                self.listed = templates
                self.version += 1
            self._close({name for name in self._open if name[0] not in present_keys})

    def _close(self, names: Iterable[tuple[str, Anchor]]) -> None:
        for name in names:
            self._open.drop(name)


def _most_open_files() -> int:
    """Return the most entries whose files may be open: half of the process's limit of descriptors.
    Files that rows read stay open beyond that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:  # many systems begin with 1024 and allow far more
        soft = _FILES if hard == resource.RLIM_INFINITY else min(hard, max(soft, _FILES))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(_FILES, max(_FILES if soft < 0 else soft, 128)) // 2
