"""What every tier of the store does, whether it keeps entries in memory, in files or far away."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from maskserve_common.contracts.keys import Anchor
from maskserve_common.files import store
from maskserve_engine.cache.entries import AnchorEntry


@dataclass(frozen=True, slots=True)
class Note:
    """What an entry's template is called and worth; kept beside every entry."""

    template_id: str
    """Of the first that was primed of those that share it (`contracts.keys.entries_id`)."""
    anchors: int
    """Entries that the whole template has."""
    rebuild_s: float
    """Seconds to compute the whole template anew."""


@dataclass(slots=True)
class Held:
    """A template in a tier."""

    note: Note
    anchors: dict[Anchor, int]
    """Bytes of each entry."""
    used: float = 0.0
    """When it was last of use, in seconds of the tier's clock."""
    pinned: bool = False

    @property
    def nbytes(self) -> int:
        return sum(self.anchors.values())

    @property
    def whole(self) -> bool:
        return len(self.anchors) >= self.note.anchors

    def eviction_score(self, now: float, rebuild_s: float) -> float:
        """Grows with its age and bytes and falls with what it costs to have it again."""
        return max(now - self.used, 1e-3) * self.nbytes / max(rebuild_s, 1e-6)


Rebuild = Callable[[str, Held], float]
"""Seconds to have a template again in a tier: from the tier below, or computed."""


def computed_anew(key: str, held: Held) -> float:
    """`Rebuild` where no tier below has the template."""
    return held.note.rebuild_s


class Tier(Protocol):
    """Keeps entries by (key, anchor) within a byte budget.

    Whole templates are evicted, the highest `Held.eviction_score` first: one with anchors
    missing serves no row. What was handed out stays valid after its eviction. Nothing here raises
    for what a disk, a network or a full memory does: that is logged, counted, and answered with
    "not there" or "not kept".
    """

    name: str
    budget_bytes: int
    evictions: int
    corrupt: int
    """Entries dropped because their checksum or form was wrong."""
    failures: int
    """Writes and reads that the medium refused."""

    def put(self, key: str, entry: AnchorEntry, note: Note) -> bool:
        """Keep an entry; False when it cannot be, and then nothing of it is visible."""
        ...

    def get(self, key: str, anchor: Anchor) -> AnchorEntry | None:
        """The entry, checked; None when it is not there or was bad, and then it is dropped."""
        ...

    def anchors(self, key: str) -> frozenset[Anchor]:
        """Anchors held of a template."""
        ...

    def note(self, key: str) -> Note | None:
        """The note of a template of which an entry was put or got."""
        ...

    def touch(self, key: str) -> None:
        """The template was of use."""
        ...

    def pin(self, key: str, *, pinned: bool) -> None:
        """Keep a template that is held from eviction, or no longer."""
        ...

    def evict(self, key: str) -> int:
        """Drop a template, pinned or not; returns the bytes given back."""
        ...

    def held(self) -> Mapping[str, Held]:
        """All templates, parts of templates too, by key."""
        ...

    def check_integrity(self) -> None:
        """Raises AssertionError when the books do not match what is held."""
        ...


def chosen_victims(
    held: Mapping[str, Held], missing: int, keep: frozenset[str], now: float, rebuild: Rebuild
) -> list[str] | None:
    """Keys to evict until `missing` bytes are free; None when that cannot be.

    Args:
        held: templates of the tier.
        missing: bytes over the budget.
        keep: keys that must stay, beside the pinned ones.
        now: of the tier's clock.
        rebuild: of the tier.
    """
    if missing <= 0:
        return []
    free = {
        k: template.nbytes for k, template in held.items() if k not in keep and not template.pinned
    }
    scores = {key: held[key].eviction_score(now, rebuild(key, held[key])) for key in free}
    return store.chosen_victims(free, missing, lambda key: -scores[key])
