"""The protocol of all tiers, for entries in memory, in files or under a URL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from maskserve_common.contracts.keys import Anchor
from maskserve_common.files import store
from maskserve_engine.cache.entries import AnchorEntry


@dataclass(frozen=True, slots=True)
class Note:
    """Identity and worth of an entry's template; stored beside every entry."""

    template_id: str
    """Id of the first primed template of those with these entries (`contracts.keys.entries_id`)."""
    anchors: int
    """Number of entries of the complete template."""
    rebuild_s: float
    """Seconds to compute the whole template again."""


@dataclass(slots=True)
class TierEntry:
    """The entries of one template in a tier."""

    note: Note
    anchors: dict[Anchor, int]
    """Bytes of each entry."""
    used: float = 0.0
    """Time of last use, in seconds of the tier's clock."""
    pinned: bool = False

    @property
    def nbytes(self) -> int:
        return sum(self.anchors.values())

    @property
    def whole(self) -> bool:
        return len(self.anchors) >= self.note.anchors

    def eviction_score(self, now: float, rebuild_s: float) -> float:
        """Return the score by which templates are evicted, highest first: age times bytes by
        rebuild seconds.
        """
        return max(now - self.used, 1e-3) * self.nbytes / max(rebuild_s, 1e-6)


Rebuild = Callable[[str, TierEntry], float]
"""Returns the seconds to get an evicted template back: from the tier below, or by computing it."""


def computed_anew(key: str, entries: TierEntry) -> float:
    """Return the seconds to compute a template again; `Rebuild` of the lowest tier."""
    return entries.note.rebuild_s


class Tier(Protocol):
    """Keeps entries by (key, anchor) within a byte budget.

    Whole templates are evicted, the highest `TierEntry.eviction_score` first: a template with
    missing anchors serves no row. Entries in use stay valid after their eviction. Errors of disks,
    networks and memory are not raised: they are logged and counted, and the result is "not there"
    or "not kept".
    """

    name: str
    budget_bytes: int
    evictions: int
    corrupt: int
    """Entries dropped because their checksum or form was wrong."""
    failures: int
    """Writes and reads that the medium refused."""

    def put(self, key: str, entry: AnchorEntry, note: Note) -> bool:
        """Keep an entry; return False if that is impossible: then no part of it can be read."""
        ...

    def get(self, key: str, anchor: Anchor) -> AnchorEntry | None:
        """Return the checked entry; None if it is missing or bad. A bad entry is dropped."""
        ...

    def anchors(self, key: str) -> frozenset[Anchor]:
        """Return the anchors of a template in this tier."""
        ...

    def note(self, key: str) -> Note | None:
        """Return the template's note, stored with its entries."""
        ...

    def touch(self, key: str) -> None:
        """Mark the template as used now."""
        ...

    def pin(self, key: str, *, pinned: bool) -> None:
        """Protect a template from eviction, or end that."""
        ...

    def evict(self, key: str) -> int:
        """Evict a template, pinned or not; return the bytes freed."""
        ...

    def entries(self) -> Mapping[str, TierEntry]:
        """Return all templates by key, incomplete ones included."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError when the accounts do not match what is stored."""
        ...


def chosen_victims(
    entries: Mapping[str, TierEntry],
    missing: int,
    keep: frozenset[str],
    now: float,
    rebuild: Rebuild,
) -> list[str] | None:
    """Return the keys to evict until `missing` bytes are free; None: that is impossible.

    Args:
        entries: templates of the tier.
        missing: bytes over the budget.
        keep: keys that must stay, beside the pinned ones.
        now: time of the tier's clock.
        rebuild: rebuild seconds of the tier's templates.
    """
    if missing <= 0:
        return []
    free = {
        k: template.nbytes
        for k, template in entries.items()
        if k not in keep and not template.pinned
    }
    scores = {key: entries[key].eviction_score(now, rebuild(key, entries[key])) for key in free}
    return store.chosen_victims(free, missing, lambda key: -scores[key])
