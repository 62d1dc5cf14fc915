"""Which LoRAs are on the device, which edits need them, and how long an edit may go without.

An edit holds its LoRAs from when it is accepted until it ends: what it waits for, or steps with,
is not evicted. Used by the engine thread only; loading goes on in others (`LoraLoader`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import msgspec

from maskserve_core.adapters.folder import AdapterFile
from maskserve_core.config import Config, ConfigError
from maskserve_core.contracts.keys import NO_SCOPE, scope_of
from maskserve_core.contracts.request import Lora
from maskserve_core.contracts.status_record import (
    ADAPTERS_LISTED,
    AdapterStatus,
    AdapterTierTotal,
    LoadCost,
)
from maskserve_core.errors import MaskserveError, Overloaded
from maskserve_core.shares import Shares
from maskserve_core.worker.observations import Observations
from maskserve_engine.adapters.lora_loader import LoadedLora
from maskserve_engine.requests.load_costs import LoadCosts
from maskserve_engine.requests.popularity import Popularity
from maskserve_engine.requests.residency import Residency, Resource
from maskserve_engine.stages.loader import dtype_of

KIND = "lora"
_EVICTED_KEPT = 64
ESTIMATES: Mapping[str, LoadCost] = MappingProxyType(
    {"host": LoadCost(0.01, 1e-9), "storage": LoadCost(0.1, 1e-8)}
)
"""Of loads before any was measured: a read of 1 GB/s from memory, 100 MB/s and 0.1 s from the
storage.
"""


class LoraSource(Protocol):
    """What brings LoRAs to the executor: `LoraLoader`."""

    def file_bytes(self, lora: Lora) -> int: ...

    def typical_bytes(self) -> float: ...

    def on_host(self) -> tuple[AdapterFile, ...]: ...

    def load(self, lora: Lora, done: Callable[[LoadedLora | MaskserveError], None]) -> None: ...

    def close(self) -> None: ...


Came = Callable[[Lora, LoadedLora | MaskserveError], None]
"""Told, in any thread, what became of a LoRA that was asked for."""


class Loras:
    """The LoRAs of a worker's edits.

    Args:
        config: of the worker.
        residency: keeps the budget of kind `lora`.
        loader: of files.
        came: hands its news to the engine's thread, which passes them to `arrived` or `failed`.
        observations: of the worker.
    """

    def __init__(
        self,
        config: Config,
        residency: Residency,
        loader: LoraSource,
        came: Came,
        observations: Observations,
    ) -> None:
        self._residency, self._loader, self._came = residency, loader, came
        self._observations = observations
        self._bytes_per_weight = dtype_of(config).itemsize
        self._profiles = read_profiles(config.adapters.profiles)
        self._loaded: dict[str, tuple[str, LoadedLora]] = {}
        """Version → name and what is on the device."""
        self._owners: dict[str, tuple[Resource, ...]] = {}
        """What each edit, or priming, holds."""
        self._pinned = Shares(config.adapters.device_bytes)
        """Bytes on the device of what the edits of each key hold, however many hold it."""
        self._holders: dict[tuple[str, Resource], tuple[int, int]] = {}
        """Key and LoRA -> edits that hold it, and its bytes."""
        self._coming: dict[str, tuple[str, int]] = {}
        """Version → name and file's bytes of what is on its way."""
        self.costs = LoadCosts(ESTIMATES)
        self._popularity = Popularity()
        self._evicted: dict[str, tuple[str, int]] = {}
        """Version → name and file's bytes of the last ones that made room and are not here."""
        self.counters = new_counters()
        self._listed: tuple[AdapterStatus, ...] | None = None
        self._listed_host: tuple[AdapterFile, ...] = ()
        self._tiers: Mapping[str, AdapterTierTotal] = {}

    def hold(self, owner: str, loras: Sequence[Lora]) -> tuple[Resource, ...]:
        """Keep these for an edit or a priming, and have brought what is not here; the latter.

        Raises:
            MaskserveError: one of them cannot be had; nothing is kept then.
        """
        wanted = tuple([Resource(KIND, lora.version) for lora in loras])
        if owner not in self._owners:
            self._book(scope_of(owner), loras, wanted)
            self._owners[owner] = wanted
            for resource in wanted:
                self._residency.pin(resource)
                self._popularity.used(resource.name)
        try:
            for lora, resource in zip(loras, wanted, strict=True):
                self._bring(lora, resource)
        except MaskserveError:
            self.let_go(owner)
            raise
        return tuple([each for each in wanted if self._residency.state(each) != "here"])

    def let_go(self, owner: str) -> None:
        """It has ended, or goes on without any."""
        held = self._owners.pop(owner, ())
        for resource in held:
            self._residency.unpin(resource)
            place = scope_of(owner), resource
            edits, nbytes = self._holders.pop(place)
            if edits > 1:
                self._holders[place] = edits - 1, nbytes
            else:
                self._pinned.give_back(place[0], nbytes)
        if held:
            self._bring_back()

    def arrived(self, lora: Lora, loaded: LoadedLora) -> list[str]:
        """It can be used; the edits that wait for nothing more."""
        self._observations.add("adapter_load_seconds", loaded.seconds, loaded.source)
        self.costs.add(loaded.source, loaded.file_bytes, loaded.seconds)
        self._coming.pop(lora.version, None)
        self._listed = None
        self._loaded[lora.version] = lora.name, loaded
        return self._residency.arrived(Resource(KIND, lora.version))

    def failed(self, lora: Lora, error: MaskserveError) -> list[str]:
        """It will not come; the edits that waited for it."""
        self.counters["adapter_load_failures_total"] += 1
        self._coming.pop(lora.version, None)
        self._listed = None
        return self._residency.failed(Resource(KIND, lora.version), error)

    def dropped(self, resource: Resource) -> None:
        """It has made room for another."""
        self.counters["adapter_evictions_total"] += 1
        gone = self._loaded.pop(resource.name, None)
        if gone is not None:
            name, loaded = gone
            self._evicted[resource.name] = name, loaded.file_bytes
            if len(self._evicted) > _EVICTED_KEPT:
                del self._evicted[next(iter(self._evicted))]
        self._listed = None

    def digest(self, lora: Lora) -> str:
        """sha256 of the file of a LoRA that is here."""
        return self._loaded[lora.version][1].digest

    def layers(self, lora: Lora) -> Mapping[str, int]:
        """Numbers in the factors of a LoRA that is here, by the denoiser's layers."""
        return self._loaded[lora.version][1].layers

    def file_bytes(self, loras: Sequence[Lora]) -> int:
        """Of the files of LoRAs that are here."""
        return sum(self._loaded[lora.version][1].file_bytes for lora in loras)

    def typical_bytes(self) -> float:
        """Of a file, on average over all that may be asked for; 0: none is known."""
        return self._loader.typical_bytes()

    def names(self) -> tuple[str, ...]:
        """Of those on the device."""
        return tuple(sorted({name for name, _ in self._loaded.values()}))

    def nbytes(self) -> int:
        """Of those on the device."""
        return sum(loaded.nbytes for _, loaded in self._loaded.values())

    def waited(self, seconds: float) -> None:
        """An edit with LoRAs has gone on after so long a wait for them."""
        self._observations.add("adapter_wait_seconds", seconds)

    def tiers(self) -> Mapping[str, AdapterTierTotal]:
        """What each tier holds; as of `listed`."""
        return self._tiers

    def listed(self) -> tuple[AdapterStatus, ...]:
        """What routers are told of; the same object for as long as nothing changes."""
        host = self._loader.on_host()
        if self._listed is None or host is not self._listed_host:
            self._listed_host = host
            found = {
                each.name: AdapterStatus(each.name, "host", each.nbytes, each.digest)
                for each in host
            }
            for name, nbytes in self._coming.values():
                found[name] = AdapterStatus(name, "coming", nbytes)
            for name, loaded in self._loaded.values():
                found.pop(name, None)  # else it would keep its place among those on the host
                found[name] = AdapterStatus(name, "device", loaded.file_bytes, loaded.digest)
            self._listed = tuple(found.values())[-ADAPTERS_LISTED:]
            self._tiers = {
                "device": AdapterTierTotal(len(self._loaded), self.nbytes()),
                "host": AdapterTierTotal(len(host), sum(each.nbytes for each in host)),
            }
        return self._listed

    def steps_without(self, lora: Lora, sigmas: Sequence[tuple[float, float]]) -> int:
        """First steps of an edit that look the same without the LoRA, as it was profiled; 0 for one
        that was not.
        """
        until = self._profiles.get(lora.name, 2.0)
        return next((i for i, (sigma, _) in enumerate(sigmas) if sigma <= until), len(sigmas))

    def _book(self, key: str, loras: Sequence[Lora], wanted: Sequence[Resource]) -> None:
        """Raises Overloaded: these are more than the key's share of the device's bytes beside those
        that its other edits hold.
        """
        sizes = {
            resource: self._residency.nbytes_of(resource)
            or self._device_bytes(self._loader.file_bytes(lora))
            for lora, resource in zip(loras, wanted, strict=True)
            if (key, resource) not in self._holders
        }
        held, more = self._pinned.held(key), sum(sizes.values())
        if key != NO_SCOPE and held and more > self._pinned.room(key):
            raise Overloaded(
                f"SETTINGS.loras: edits of this key hold LoRAs of {held} bytes, its share of "
                "[adapters] device_bytes; try again later"
            )
        for resource in wanted:
            edits, nbytes = self._holders.get((key, resource), (0, sizes.get(resource, 0)))
            if not edits:
                self._pinned.book(key, nbytes)
            self._holders[key, resource] = edits + 1, nbytes

    def _bring(self, lora: Lora, resource: Resource) -> None:
        if self._residency.state(resource) in ("here", "coming"):
            self._value(resource)
            return
        file_bytes = self._loader.file_bytes(lora)
        nbytes = self._device_bytes(file_bytes)
        # It is asked for now, so all that nobody holds may go for it, whatever its worth.
        if not self._residency.coming(resource, nbytes, math.inf):
            raise Overloaded(
                f"SETTINGS.loras: there is no room for adapter {lora.name} beside those of the "
                "edits under way ([adapters] device_bytes); try again later"
            )
        self._load(lora, resource, file_bytes)

    def _bring_back(self) -> None:
        """One that made room is worth more than one that nobody holds any more: it comes back,
        before anybody has to wait for it. Only while no other load is on its way.
        """
        if self._coming or not self._evicted:
            return

        def worth(version: str) -> float:
            return self._popularity.worth(version, self._device_bytes(self._evicted[version][1]))

        version = max(self._evicted, key=worth)
        name, file_bytes = self._evicted[version]
        resource = Resource(KIND, version)
        if self._residency.coming(resource, self._device_bytes(file_bytes), worth(version)):
            self._load(Lora(name=name, scale=1.0, version=version), resource, file_bytes)

    def _load(self, lora: Lora, resource: Resource, file_bytes: int) -> None:
        self._evicted.pop(lora.version, None)
        self._value(resource)
        self._coming[lora.version], self._listed = (lora.name, file_bytes), None
        self._loader.load(lora, lambda outcome: self._came(lora, outcome))

    def _device_bytes(self, file_bytes: int) -> int:
        """Of a file in half precision; what it takes is known only once it is read."""
        return file_bytes * self._bytes_per_weight // 2

    def _value(self, resource: Resource) -> None:
        """Who goes first when another needs room: the least uses per byte."""
        worth = self._popularity.worth(resource.name, self._residency.nbytes_of(resource))
        self._residency.touch(resource, worth)


def new_counters() -> dict[str, int]:
    """Totals since the worker's start, by metric."""
    return {"adapter_load_failures_total": 0, "adapter_evictions_total": 0}


def adapters_id(loras: Sequence[tuple[str, float]]) -> str:
    """Names the model that digests and scales of LoRAs make of the base; empty without any."""
    if not loras:
        return ""
    text = json.dumps(sorted(loras))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_profiles(path: str) -> Mapping[str, float]:
    """Adapter → the sigma until which an edit may go without it (`scripts/bench profile_lora`).

    Raises:
        ConfigError: the file cannot be read.
    """
    if not path:
        return {}
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=dict[str, float])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"[adapters] profiles: {path} cannot be read: {error}") from error
