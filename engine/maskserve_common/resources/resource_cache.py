"""Resource cache of one kind: the resources on the device, the edits that need them, and eviction.

An owner (an edit, a priming, another process's session) keeps its resources from acceptance until
its end: they are not evicted while it waits or steps. Among the others, the least used per byte is
evicted first. Used by one thread at a time; other threads load (`ResourceLoader`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Generic

from maskserve_common.contracts.status_record import ADAPTERS_LISTED, AdapterStatus
from maskserve_common.errors import MaskserveError, Overloaded
from maskserve_common.files.adapter_folder import AdapterFile
from maskserve_common.observations import Observations
from maskserve_common.resources.load_costs import LoadCosts
from maskserve_common.resources.loading import Kind, Loaded, Source, W
from maskserve_common.resources.popularity import Popularity
from maskserve_common.resources.resource_states import Resource, ResourceStates


class ResourceCache(ABC, Generic[W]):
    """Resource cache of one kind.

    Args:
        kind: kind of the resources.
        resource_states: states of all resources, with budgets and waiting edits.
        source: loader of the files.
        on_loaded: hands a load's end to this object's thread, which calls `arrived` or `failed`.
        observations: observations of the worker.
    """

    def __init__(
        self,
        kind: Kind,
        resource_states: ResourceStates,
        source: Source[W],
        on_loaded: Callable[[W, Loaded | MaskserveError], None],
        observations: Observations,
    ) -> None:
        self.kind, self._resource_states, self._source, self._on_loaded = (
            kind,
            resource_states,
            source,
            on_loaded,
        )
        self._observations, self._popularity = observations, Popularity()
        self.costs, self.counters = LoadCosts(kind.estimates), kind.counters()
        self._loaded: dict[str, tuple[str, Loaded]] = {}
        """Version → name and loaded resource."""
        self._loading: dict[str, tuple[str, int]] = {}
        """Version → name and bytes of each loading resource, as records list them."""
        self._owners: dict[str, tuple[Resource, ...]] = {}
        """Resources that each owner needs."""
        self._listed: tuple[AdapterStatus, ...] | None = None
        self._listed_host: tuple[AdapterFile, ...] = ()

    def resource(self, item: W) -> Resource:
        return Resource(self.kind.name, item.version)

    def hold(self, owner: str, items: Sequence[W]) -> tuple[Resource, ...]:
        """Keep resources for an owner, and load the missing ones; return those that are not ready.

        Raises:
            MaskserveError: one of them is not available; nothing is kept then.
        """
        resources = {self.resource(item): item for item in items}
        if owner not in self._owners:
            self._book(owner, resources)
            self._owners[owner] = tuple(resources)
            for resource in resources:
                self._resource_states.pin(resource)
                self._popularity.record_use(resource.name)
        try:
            for resource, item in resources.items():
                self._request(resource, item)
        except MaskserveError:
            self.release(owner)
            raise
        return tuple([item for item in resources if self._resource_states.state(item) != "ready"])

    def release(self, owner: str) -> None:
        """Release the resources of an owner that has ended, or goes on without any."""
        for resource in self._owners.pop(owner, ()):
            self._resource_states.unpin(resource)
            self._release(owner, resource)

    def record_arrival(self, item: W, loaded: Loaded) -> list[str]:
        """Record that a resource is ready; return the edits that wait for nothing more."""
        labels = (loaded.source,) if len(self.kind.estimates) > 1 else ()
        self._observations.add(f"{self.kind.metrics}_load_seconds", loaded.seconds, *labels)
        self.costs.add(loaded.source, loaded.file_bytes, loaded.seconds)
        self._loading.pop(item.version, None)
        self._loaded[item.version], self._listed = (item.name, loaded), None
        return self._resource_states.record_arrival(self.resource(item))

    def record_failure(self, item: W, error: MaskserveError) -> list[str]:
        """Record that a load failed; return the edits that waited for it."""
        self.counters[f"{self.kind.metrics}_load_failures_total"] += 1
        self._loading.pop(item.version, None)
        self._listed = None
        return self._resource_states.record_failure(self.resource(item), error)

    def record_eviction(self, resource: Resource) -> None:
        """Record that a resource was evicted or lost."""
        self.counters[f"{self.kind.metrics}_evictions_total"] += 1
        self._loaded.pop(resource.name, None)
        self._listed = None

    def record_wait(self, seconds: float) -> None:
        """Record the seconds that an edit has waited for resources."""
        self._observations.add(f"{self.kind.metrics}_wait_seconds", seconds)

    def loaded(self, item: W) -> Loaded:
        """Return a ready resource."""
        return self._loaded[item.version][1]

    def digest(self, item: W) -> str:
        """Return the sha256 of a ready resource's files."""
        return self.loaded(item).digest

    def names(self) -> tuple[str, ...]:
        """Names of the resources on the device."""
        return tuple(sorted({name for name, _ in self._loaded.values()}))

    def nbytes(self) -> int:
        """Bytes of the resources on the device."""
        return sum(loaded.nbytes for _, loaded in self._loaded.values())

    def typical_bytes(self) -> float:
        """See `Source.typical_bytes`."""
        return self._source.typical_bytes()

    def listed(self) -> tuple[AdapterStatus, ...]:
        """Resources as the status record lists them; the same object for as long as nothing
        changes.
        """
        host = self._on_host()
        if self._listed is None or host is not self._listed_host:
            self._listed_host = host
            statuses = {
                file.name: AdapterStatus(file.name, "host", file.nbytes, file.digest)
                for file in host
            }
            for name, nbytes in self._loading.values():
                statuses[name] = AdapterStatus(name, "coming", nbytes)
            for name, loaded in self._loaded.values():
                statuses.pop(name, None)  # else it would keep its place among those on the host
                statuses[name] = AdapterStatus(name, "device", loaded.file_bytes, loaded.digest)
            self._listed = tuple(statuses.values())[-ADAPTERS_LISTED:]
        return self._listed

    def _book(self, owner: str, items: Mapping[Resource, W]) -> None:
        """Called when an owner begins to use these. Raises Overloaded: it may not use them."""

    def _release(self, owner: str, resource: Resource) -> None:
        """Called when an owner releases a resource."""

    def _on_host(self) -> tuple[AdapterFile, ...]:
        """Files in the host's memory that routers read of; the same object as long as nothing
        changes.
        """
        return ()

    def _request(self, resource: Resource, item: W) -> None:
        if self._resource_states.state(resource) in ("ready", "loading"):
            self._value(resource)
            return
        # It is needed now, so every resource without an owner may be evicted for it.
        if not self._load(resource, item, math.inf):
            kind = self.kind
            raise Overloaded(
                f"{kind.setting}: there is no room for {kind.noun} {item.name} beside those of "
                f"running edits ({kind.budget}); try again later"
            )

    def _load(self, resource: Resource, item: W, worth: float) -> bool:
        """Load a resource if there is room, or if less valuable ones can be evicted; return whether
        it loads.
        """
        device_bytes, record_bytes = self._bytes(item)
        if not self._resource_states.reserve(resource, device_bytes, worth):
            return False
        self._value(resource)
        self._loading[item.version], self._listed = (item.name, record_bytes), None
        self._source.load(item, lambda outcome: self._on_loaded(item, outcome))
        return True

    @abstractmethod
    def _bytes(self, item: W) -> tuple[int, int]:
        """Return its bytes on the device, and in records.

        Raises:
            MaskserveError: it is not served, or no longer.
        """

    def _value(self, resource: Resource) -> None:
        """Update the resource's score: uses per byte; the lowest is evicted first."""
        worth = self._popularity.worth(resource.name, self._resource_states.nbytes_of(resource))
        self._resource_states.touch(resource, worth)
