"""The nearest tier: entries in the device's memory, and the account of all cache bytes there."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

from maskserve_common.contracts.keys import Anchor
from maskserve_common.contracts.tiers import DEVICE
from maskserve_engine.cache.entries import AnchorEntry
from maskserve_engine.cache.tier import Note, Rebuild, TierEntry, chosen_victims, computed_anew


class MemoryTier:
    """Entries on the device. The same budget has the bytes of rows: entries that were evicted while
    a row reads them, and tokens that were loaded for rows.

    Args:
        rebuild: returns the seconds to make a template again.
        clock: clock, in seconds.
    """

    name = DEVICE.name

    def __init__(
        self,
        budget_bytes: int,
        rebuild: Rebuild = computed_anew,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.evictions = self.corrupt = self.failures = 0
        self.booked = 0
        """Bytes of rows beside the kept entries."""
        self._rebuild, self._clock = rebuild, clock
        self._listing: dict[str, TierEntry] = {}
        self._entries: dict[tuple[str, Anchor], AnchorEntry] = {}
        self._entry_bytes = 0
        """Bytes of the kept entries."""
        self._pins: set[str] = set()
        self._lent: Counter[int] = Counter()
        """Number of readers of an entry, by its id()."""
        self._evicted: dict[int, AnchorEntry] = {}
        """Evicted entries that rows still read, by id(); their bytes stay reserved."""
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return self._entry_bytes + self.booked

    @property
    def lent(self) -> int:
        return len(self._lent)

    @property
    def pinned(self) -> frozenset[str]:
        """Pinned keys, cached or not."""
        return frozenset(self._pins)

    def put(self, key: str, entry: AnchorEntry, note: Note) -> bool:
        with self._lock:
            template = self._listing.get(key)
            old = template.anchors.get(entry.anchor, 0) if template else 0
            if not self._make_room(entry.nbytes - old, frozenset({key})):
                return False
            if template is None:
                template = self._listing[key] = TierEntry(note, {}, pinned=key in self._pins)
            if old:
                self._drop(key, entry.anchor)
            template.note, template.used = note, self._clock()
            template.anchors[entry.anchor] = entry.nbytes
            self._entries[key, entry.anchor] = entry
            self._entry_bytes += entry.nbytes
            return True

    def get(self, key: str, anchor: Anchor) -> AnchorEntry | None:
        return self._entries.get((key, anchor))

    def anchors(self, key: str) -> frozenset[Anchor]:
        template = self._listing.get(key)
        return frozenset(template.anchors) if template else frozenset()

    def note(self, key: str) -> Note | None:
        template = self._listing.get(key)
        return template.note if template else None

    def touch(self, key: str) -> None:
        if key in self._listing:
            self._listing[key].used = self._clock()

    def pin(self, key: str, *, pinned: bool) -> None:
        with self._lock:
            (self._pins.add if pinned else self._pins.discard)(key)
            if key in self._listing:
                self._listing[key].pinned = pinned

    def evict(self, key: str) -> int:
        with self._lock:
            return self._evict(key)

    def entries(self) -> Mapping[str, TierEntry]:
        with self._lock:
            return dict(self._listing)

    def lend(self, entry: AnchorEntry) -> None:
        """Count a row as a reader of a kept entry: its bytes stay reserved until its return."""
        with self._lock:
            self._lent[id(entry)] += 1

    def give_back(self, entry: AnchorEntry) -> None:
        with self._lock:
            self._lent[id(entry)] -= 1
            if not self._lent[id(entry)]:
                del self._lent[id(entry)]
                if self._evicted.pop(id(entry), None) is not None:
                    self.booked -= entry.nbytes

    def book(self, nbytes: int, *, force: bool = False, spare: bool = False) -> bool:
        """Reserve bytes for rows; return False if there is no room for them.

        Args:
            nbytes: bytes of the tokens.
            force: reserve them in any case.
            spare: reserve them only if no template has to be evicted for them.
        """
        with self._lock:
            if spare and self.nbytes + nbytes > self.budget_bytes:
                return False
            fits = self._make_room(nbytes, frozenset())
            if fits or force:
                self.booked += nbytes
            return fits or force

    def make_way(self, keep: frozenset[str] = frozenset()) -> bool:
        """Evict the template of least worth outside `keep`; return False if there is none."""
        with self._lock:
            chosen = self._victims(1, keep)
            for key in chosen or ():
                self._evict(key)
            return bool(chosen)

    def unbook(self, nbytes: int) -> None:
        with self._lock:
            self.booked -= nbytes

    def check_integrity(self) -> None:
        with self._lock:
            total = sum(template.nbytes for template in self._listing.values())
            assert total == self._entry_bytes, f"{self._entry_bytes} booked, {total} held"
            entries = sum(entry.nbytes for entry in self._entries.values())
            assert entries == total, f"{total} in the books, {entries} in memory"
            assert self._entry_bytes <= self.budget_bytes, "over budget"
            assert self.booked >= sum(entry.nbytes for entry in self._evicted.values())
            assert all(count > 0 for count in self._lent.values()), "a loan without a reader"
            assert set(self._evicted) <= set(self._lent), "an entry that nobody reads is held"

    def _make_room(self, nbytes: int, keep: frozenset[str]) -> bool:
        """Evict templates until `nbytes` fit; evict none if they cannot fit."""
        missing = self.nbytes + nbytes - self.budget_bytes
        chosen = self._victims(missing, keep) if missing > 0 else []
        for key in chosen or ():
            self._evict(key)
        return chosen is not None

    def _victims(self, missing: int, keep: frozenset[str]) -> list[str] | None:
        # Evicting an entry that a row reads frees nothing.
        read = {key for (key, _), entry in self._entries.items() if self._lent[id(entry)]}
        return chosen_victims(self._listing, missing, keep | read, self._clock(), self._rebuild)

    def _evict(self, key: str) -> int:
        template = self._listing.pop(key, None)
        if template is None:
            return 0
        self.evictions += 1
        for anchor in template.anchors:
            self._drop(key, anchor)
        return template.nbytes

    def _drop(self, key: str, anchor: Anchor) -> None:
        entry = self._entries.pop((key, anchor))
        self._entry_bytes -= entry.nbytes
        if self._lent.get(id(entry)):
            self._evicted[id(entry)] = entry
            self.booked += entry.nbytes
