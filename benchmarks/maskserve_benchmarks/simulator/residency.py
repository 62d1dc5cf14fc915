"""The templates that a host has entries of, and their tiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field

import torch

from maskserve_benchmarks.simulator.hardware import Hardware
from maskserve_common.contracts.keys import Anchor
from maskserve_engine.cache.entries import AnchorEntry, BlockEntry, Coded
from maskserve_engine.cache.memory_tier import MemoryTier
from maskserve_engine.cache.tier import Note, computed_anew
from maskserve_engine.fitting.entry_store import rebuild_from


class _Disk(MemoryTier):
    name = "disk"


@dataclass(slots=True)
class Host:
    """The tiers that the workers of one machine share: memory and a disk, each with room for a
    number of templates. The production tier counts the bytes and chooses what to evict. As in
    production, writes go to both tiers, and a fetched template stays on the disk.
    """

    name: str
    hardware: Hardware
    host_templates: int
    disk_templates: int
    clock: Callable[[], float]
    memory: MemoryTier = field(init=False)
    disk: MemoryTier = field(init=False)
    missed: set[str] = field(default_factory=set)
    """Templates that missed once: the next miss primes them."""
    priming: set[str] = field(default_factory=set)
    fetching: dict[str, float] = field(default_factory=dict)
    """Template → time at which it will be in memory."""
    disk_free_at: float = 0.0
    fetches: int = 0
    _names: dict[str, set[str]] = field(init=False)

    def __post_init__(self) -> None:
        size = self.hardware.template_bytes
        self.disk = _Disk(size * self.disk_templates, computed_anew, self.clock)
        rebuild = rebuild_from(self.disk, self.hardware.costs, computed_anew)
        self.memory = MemoryTier(size * self.host_templates, rebuild, self.clock)
        self._names = {"host": set(), "disk": set()}

    def tiers(self) -> Mapping[str, Set[str]]:
        """Return live views for routing."""
        return self._names

    def use(self, template: str) -> None:
        """Note that the template's entries were loaded from memory."""
        self.memory.touch(template)
        self.disk.touch(template)

    def keep(self, template: str, *tiers: MemoryTier) -> None:
        """Put a template's entries into tiers and make room for them."""
        note = Note(template, 1, self.hardware.prime_seconds)
        for tier in tiers:
            tier.put(template, _entry(self.hardware.template_bytes), note)
        for name, tier in (("host", self.memory), ("disk", self.disk)):
            self._names[name].clear()
            self._names[name].update(tier.entries())

    def fetch(self, template: str, now: float) -> float:
        """Fetch a template from disk, which serves one fetch at a time; return when it will be in
        memory.
        """
        if template not in self.fetching:
            seconds = self.hardware.pricing.fetch_s("disk")
            self.disk_free_at = max(self.disk_free_at, now) + seconds
            self.fetching[template] = self.disk_free_at
            self.fetches += 1
        return self.fetching[template]

    def end_fetch(self, template: str) -> None:
        """End a fetch; the template may have been kept meanwhile."""
        self.fetching.pop(template, None)
        self.keep(template, self.memory)

    def should_prime(self, template: str) -> bool:
        """Return whether to prime a template after a miss. Priming starts at the second miss,
        because an image that occurs once is not worth it (design §4).
        """
        if template in self.priming or template in self._names["host"]:
            return False
        if template not in self.missed:
            self.missed.add(template)
            return False
        self.priming.add(template)
        return True

    def end_priming(self, template: str) -> None:
        self.priming.discard(template)
        self.missed.discard(template)
        self.keep(template, self.memory, self.disk)


def _entry(nbytes: int) -> AnchorEntry:
    """Return a whole template's entries as one entry that takes no memory."""
    data = torch.empty(nbytes, dtype=torch.uint8, device="meta")
    return AnchorEntry(Anchor(0.5, 500.0), (BlockEntry(Coded("model", data)),))
