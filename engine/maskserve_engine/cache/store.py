"""Where entries are kept: the interface of every tier and its first one, memory."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

from maskserve_core.contracts.entry_key import Anchor
from maskserve_engine.cache.entries import AnchorEntry


class EntryStore(Protocol):
    """Keeps entries by (template, anchor) within a byte budget.

    An entry that was handed out stays valid after its eviction; entries are never written again.
    """

    def put(self, template: str, entry: AnchorEntry) -> bool:
        """Keep `entry`; False when it cannot fit beside what is pinned (nothing is kept)."""
        ...

    def get(self, template: str, anchor: Anchor) -> AnchorEntry | None: ...

    def anchors(self, template: str) -> tuple[Anchor, ...]:
        """Anchors held of a template, in no order."""
        ...

    def pin(self, template: str) -> None:
        """Keep the template from eviction until as many unpins."""
        ...

    def unpin(self, template: str) -> None: ...

    def evict(self, template: str) -> int:
        """Drop a template, pinned or not; returns the bytes given back."""
        ...


@dataclass(slots=True)
class _Template:
    entries: dict[Anchor, AnchorEntry] = field(default_factory=dict)
    nbytes: int = 0


class MemoryStore:
    """Entries in this process's memory; the template least recently used goes first.

    Whole templates are evicted: one with anchors missing would serve no row.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.nbytes = 0
        self.evictions = 0
        self._templates: OrderedDict[str, _Template] = OrderedDict()
        self._pins: dict[str, int] = {}

    def put(self, template: str, entry: AnchorEntry) -> bool:
        if not self._make_room(template, entry.nbytes):
            return False
        held = self._templates.setdefault(template, _Template())
        self._templates.move_to_end(template)
        old = held.entries.get(entry.anchor)
        delta = entry.nbytes - (old.nbytes if old else 0)
        held.entries[entry.anchor] = entry
        held.nbytes += delta
        self.nbytes += delta
        return True

    def get(self, template: str, anchor: Anchor) -> AnchorEntry | None:
        held = self._templates.get(template)
        if held is None:
            return None
        self._templates.move_to_end(template)
        return held.entries.get(anchor)

    def anchors(self, template: str) -> tuple[Anchor, ...]:
        held = self._templates.get(template)
        return tuple(held.entries) if held else ()

    def pin(self, template: str) -> None:
        self._pins[template] = self._pins.get(template, 0) + 1

    def unpin(self, template: str) -> None:
        left = self._pins.get(template, 0) - 1
        if left > 0:
            self._pins[template] = left
        else:
            self._pins.pop(template, None)

    def evict(self, template: str) -> int:
        held = self._templates.pop(template, None)
        if held is None:
            return 0
        self.nbytes -= held.nbytes
        self.evictions += 1
        return held.nbytes

    def templates(self) -> dict[str, int]:
        """Bytes per template, least recently used first."""
        return {name: held.nbytes for name, held in self._templates.items()}

    def check_integrity(self) -> None:
        """Raises AssertionError when the books do not match what is held."""
        total = 0
        for name, held in self._templates.items():
            nbytes = sum(entry.nbytes for entry in held.entries.values())
            assert nbytes == held.nbytes, f"{name}: {held.nbytes} booked, {nbytes} held"
            total += nbytes
        assert total == self.nbytes, f"{self.nbytes} booked, {total} held"
        assert self.nbytes <= self.budget_bytes, "over budget"
        assert all(count > 0 for count in self._pins.values()), "a pin without a holder"

    def _make_room(self, template: str, nbytes: int) -> bool:
        """Evict until `nbytes` fit; nothing is evicted when they cannot."""
        victims = [
            (name, held.nbytes)
            for name, held in self._templates.items()
            if name != template and name not in self._pins
        ]
        missing = self.nbytes + nbytes - self.budget_bytes
        chosen = []
        for name, freed in victims:
            if missing <= 0:
                break
            chosen.append(name)
            missing -= freed
        if missing > 0:
            return False
        for name in chosen:
            self.evict(name)
        return True
