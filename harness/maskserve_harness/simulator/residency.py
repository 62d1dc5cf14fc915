"""Which templates a host has entries of, and in which tier."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Set
from dataclasses import dataclass, field


@dataclass(slots=True)
class Host:
    """The tiers that the workers of one machine share: memory and a disk, each of so many
    templates, the least recently used going from memory to disk and from disk to nowhere.
    """

    name: str
    host_templates: int
    disk_templates: int
    fetch_seconds: float
    """One template from disk to memory; the disk serves one at a time."""
    memory: OrderedDict[str, None] = field(default_factory=OrderedDict)
    disk: OrderedDict[str, None] = field(default_factory=OrderedDict)
    seen: set[str] = field(default_factory=set)
    """Templates that missed once: the next miss primes them."""
    priming: set[str] = field(default_factory=set)
    fetching: dict[str, float] = field(default_factory=dict)
    """Template -> when it will be in memory."""
    disk_free_at: float = 0.0
    fetches: int = 0

    def tiers(self) -> Mapping[str, Set[str]]:
        """Live views for routing."""
        return {"host": self.memory.keys(), "disk": self.disk.keys()}

    def use(self, template: str) -> None:
        """The template's entries are loaded from memory: it is the most recently used."""
        if template in self.memory:
            self.memory.move_to_end(template)

    def keep(self, template: str) -> None:
        """Put a template's entries into memory, making room."""
        self.memory[template] = None
        self.memory.move_to_end(template)
        self.disk.pop(template, None)
        while len(self.memory) > self.host_templates:
            evicted, _ = self.memory.popitem(last=False)
            if self.disk_templates:
                self.disk[evicted] = None
                while len(self.disk) > self.disk_templates:
                    self.disk.popitem(last=False)

    def fetch(self, template: str, now: float) -> float:
        """Bring a template from disk; when it will be in memory."""
        if template not in self.fetching:
            self.disk_free_at = max(self.disk_free_at, now) + self.fetch_seconds
            self.fetching[template] = self.disk_free_at
            self.fetches += 1
        return self.fetching[template]

    def fetched(self, template: str) -> None:
        """The fetch has ended; the template may have been kept meanwhile."""
        self.fetching.pop(template, None)
        self.keep(template)

    def wants_priming(self, template: str) -> bool:
        """A row of this template missed: whether it is to be primed now (design §4: on the second
        sight; one-shot images are not worth it).
        """
        if template in self.priming or template in self.memory:
            return False
        if template not in self.seen:
            self.seen.add(template)
            return False
        self.priming.add(template)
        return True

    def primed(self, template: str) -> None:
        self.priming.discard(template)
        self.seen.discard(template)
        self.keep(template)
