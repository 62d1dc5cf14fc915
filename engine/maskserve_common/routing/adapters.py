"""Tiers of LoRAs and ControlNets on a worker, and the time to load others to its device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from maskserve_common.contracts.status_record import AdapterStatus, LoadCost, WorkerStatus

_LEFT = 0.5
"""Share of a load still to come if another edit has begun it: half on average."""


@dataclass(frozen=True, slots=True)
class AdapterView:
    """LoRAs, or ControlNets, by name, as a worker's record lists them. Immutable."""

    loaded: Mapping[str, AdapterStatus]
    loads: Mapping[str, LoadCost]
    """Cost of a load from `host` and from `storage`."""
    typical_bytes: float
    """Bytes of an adapter that the worker does not have."""
    loading: frozenset[str] = frozenset()
    """Adapters of edits that were sent to the worker and that its record does not have yet."""

    @classmethod
    def from_status(cls, status: WorkerStatus) -> AdapterView | None:
        """Return the view of adapters; None: the record has none."""
        if not status.adapter_loads:
            return None
        statuses = {adapter.name: adapter for adapter in status.adapters}
        return cls(statuses, status.adapter_loads, status.typical_adapter_bytes)

    @classmethod
    def of_controlnets(cls, status: WorkerStatus) -> AdapterView | None:
        """Return the view of ControlNets; None: the record has none."""
        if not status.controlnet_loads:
            return None
        statuses = {controlnet.name: controlnet for controlnet in status.controlnets}
        return cls(statuses, status.controlnet_loads, status.typical_controlnet_bytes)

    def seconds(self, names: Iterable[str]) -> float:
        """Return the seconds until all are ready. They load side by side: the longest counts."""
        return max((self._seconds(name) for name in names), default=0.0)

    def nbytes(self, names: Iterable[str]) -> float:
        """Return the bytes of the files of all named adapters."""
        return sum(map(self._nbytes, names))

    def with_requested(self, names: Iterable[str]) -> AdapterView:
        """Return a copy with these adapters of sent edits."""
        more = self.loading.union(names)
        return self if more == self.loading else replace(self, loading=more)

    def _seconds(self, name: str) -> float:
        status = self.loaded.get(name)
        if status is not None and status.tier == "device":
            return 0.0
        source = "host" if status is not None and status.tier == "host" else "storage"
        cost = self.loads.get(source)
        if cost is None:
            return 0.0
        whole = cost.seconds(self._nbytes(name))
        begun = name in self.loading or (status is not None and status.tier == "coming")
        return whole * (_LEFT if begun else 1.0)

    def _nbytes(self, name: str) -> float:
        status = self.loaded.get(name)
        return self.typical_bytes if status is None else status.nbytes
