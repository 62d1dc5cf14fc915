"""The LoRAs of edits on the device, and the steps that an edit may take without them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from maskserve_common.config import Config, ConfigError
from maskserve_common.contracts.keys import NO_SCOPE, scope_of
from maskserve_common.contracts.request import Lora
from maskserve_common.contracts.status_record import AdapterStatus, AdapterTierTotal
from maskserve_common.errors import MaskserveError, Overloaded
from maskserve_common.files.adapter_folder import AdapterFile
from maskserve_common.observations import Observations
from maskserve_common.resources.loading import Loaded, Source
from maskserve_common.resources.resource_cache import ResourceCache
from maskserve_common.resources.resource_states import Resource, ResourceStates
from maskserve_common.shares import Shares
from maskserve_engine.adapters.lora_loader import LORAS, estimated_bytes

_MOST_EVICTED = 64


class LoraSource(Source[Lora], Protocol):
    """Loads LoRAs for the executor; implemented by `LoraLoader`."""

    def file_bytes(self, lora: Lora) -> int: ...

    def half_bytes(self, lora: Lora) -> int: ...

    def on_host(self) -> tuple[AdapterFile, ...]: ...


class Loras(ResourceCache[Lora]):
    """The LoRAs of a worker's edits, within the budget of kind `lora`."""

    def __init__(
        self,
        config: Config,
        resource_states: ResourceStates,
        loader: LoraSource,
        on_loaded: Callable[[Lora, Loaded | MaskserveError], None],
        observations: Observations,
    ) -> None:
        super().__init__(LORAS, resource_states, loader, on_loaded, observations)
        self._loader, self._config = loader, config
        self._key_bytes = Shares(config.adapters.device_bytes)
        """Device bytes of the LoRAs that each key's edits use; a LoRA that several edits use counts
        once.
        """
        self._holders: dict[tuple[str, Resource], tuple[int, int]] = {}
        """Number of edits of a key that use a LoRA, and its bytes."""
        self._profiles = read_profiles(config.adapters.profiles)
        self._evicted: dict[str, tuple[str, int]] = {}
        """Name and file size of the LoRAs evicted last, by version."""
        self._tiers: Mapping[str, AdapterTierTotal] = {}

    def release(self, owner: str) -> None:
        holds = owner in self._owners
        super().release(owner)
        if holds:
            self._reload_evicted()

    def record_eviction(self, resource: Resource) -> None:
        if resource.name in self._loaded:
            name, loaded = self._loaded[resource.name]
            self._evicted[resource.name] = name, loaded.file_bytes
            if len(self._evicted) > _MOST_EVICTED:
                del self._evicted[next(iter(self._evicted))]
        super().record_eviction(resource)

    def file_bytes(self, loras: Sequence[Lora]) -> int:
        return sum(self.loaded(lora).file_bytes for lora in loras)

    def tiers(self) -> Mapping[str, AdapterTierTotal]:
        return self._tiers

    def listed(self) -> tuple[AdapterStatus, ...]:
        previous_list, listed = self._listed, super().listed()
        if listed is not previous_list:
            host = self._listed_host
            self._tiers = {
                "device": AdapterTierTotal(len(self._loaded), self.nbytes()),
                "host": AdapterTierTotal(len(host), sum(status.nbytes for status in host)),
            }
        return listed

    def steps_without(self, lora: Lora, sigmas: Sequence[tuple[float, float]]) -> int:
        """Return the number of an edit's first steps that look the same without the LoRA, by its
        profile; 0 without a profile.
        """
        sigma_limit = self._profiles.get(lora.name, 2.0)
        return next((i for i, (sigma, _) in enumerate(sigmas) if sigma <= sigma_limit), len(sigmas))

    def _book(self, owner: str, items: Mapping[Resource, Lora]) -> None:
        """Count the LoRAs of an edit for its key. Raises Overloaded if they do not fit the key's
        share of the device's bytes beside the LoRAs of its other edits.
        """
        key = scope_of(owner)
        sizes = {
            resource: self._resource_states.nbytes_of(resource) or self._bytes(lora)[0]
            for resource, lora in items.items()
            if (key, resource) not in self._holders
        }
        held_bytes, new_bytes = self._key_bytes.in_use(key), sum(sizes.values())
        if key != NO_SCOPE and held_bytes and new_bytes > self._key_bytes.room(key):
            raise Overloaded(
                f"SETTINGS.loras: edits of this key hold LoRAs of {held_bytes} bytes, its share of "
                "[adapters] device_bytes; try again later"
            )
        for resource in items:
            edits, nbytes = self._holders.get((key, resource), (0, sizes.get(resource, 0)))
            if not edits:
                self._key_bytes.book(key, nbytes)
            self._holders[key, resource] = edits + 1, nbytes

    def _release(self, owner: str, resource: Resource) -> None:
        key = scope_of(owner)
        edits, nbytes = self._holders.pop((key, resource))
        if edits > 1:
            self._holders[key, resource] = edits - 1, nbytes
        else:
            self._key_bytes.give_back(key, nbytes)

    def _on_host(self) -> tuple[AdapterFile, ...]:
        return self._loader.on_host()

    def _bytes(self, item: Lora) -> tuple[int, int]:
        file_bytes = self._loader.file_bytes(item)
        return self._device_bytes(self._loader.half_bytes(item)), file_bytes

    def _device_bytes(self, half_bytes: int) -> int:
        return estimated_bytes(self._config, half_bytes)

    def _load(self, resource: Resource, item: Lora, worth: float) -> bool:
        comes = super()._load(resource, item, worth)
        if comes:
            self._evicted.pop(item.version, None)
        return comes

    def _reload_evicted(self) -> None:
        """Load an evicted LoRA again before an edit needs it; only while no other load is under
        way.
        """
        if self._loading or not self._evicted:
            return

        def worth(version: str) -> float:
            return self._popularity.worth(version, self._device_bytes(self._evicted[version][1]))

        version = max(self._evicted, key=worth)
        lora = Lora(name=self._evicted[version][0], scale=1.0, version=version)
        with suppress(MaskserveError):  # it is not served any more
            self._load(self.resource(lora), lora, worth(version))


def adapters_id(loras: Sequence[tuple[str, float]]) -> str:
    """Return an id of the base model with these LoRAs (digest and scale each);
    empty without any.
    """
    if not loras:
        return ""
    text = json.dumps(sorted(loras))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_profiles(path: str) -> Mapping[str, float]:
    """Return, by adapter, the sigma until which an edit may go without it (`scripts/bench
    profile_lora`).

    Raises:
        ConfigError: the file cannot be read.
    """
    if not path:
        return {}
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=dict[str, float])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"[adapters] profiles: {path} cannot be read: {error}") from error
