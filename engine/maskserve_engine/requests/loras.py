"""Which LoRAs are on the device, which edits need them, and how long an edit may go without.

An edit holds its LoRAs from when it is accepted until it ends: what it waits for, or steps with,
is not evicted. Used by the engine thread only; loading goes on in others (`LoraLoader`).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from maskserve_core.config import Config, ConfigError
from maskserve_core.contracts.request import EditRequest, Lora
from maskserve_core.errors import MaskserveError, Overloaded
from maskserve_core.worker.observations import Observations
from maskserve_engine.adapters.lora_loader import LoadedLora
from maskserve_engine.requests.residency import Residency, Resource

KIND = "lora"


class Loader(Protocol):
    """What brings LoRAs to the executor: `LoraLoader`."""

    def file_bytes(self, lora: Lora) -> int: ...

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
        loader: Loader,
        came: Came,
        observations: Observations,
    ) -> None:
        self._residency, self._loader, self._came = residency, loader, came
        self._observations = observations
        self._bytes_per_weight = 4 if config.model.dtype == "float32" else 2
        self._profiles = read_profiles(config.adapters.profiles)
        self._loaded: dict[str, tuple[str, LoadedLora]] = {}
        """Version → name and what is on the device."""
        self._owners: dict[str, tuple[Resource, ...]] = {}
        """What each edit, or priming, holds."""
        self.loads = self.failures = 0

    def hold(self, owner: str, loras: Sequence[Lora]) -> tuple[Resource, ...]:
        """Keep these for an edit or a priming, and have brought what is not here; the latter.

        Raises:
            MaskserveError: one of them cannot be had; nothing is kept then.
        """
        wanted = tuple([Resource(KIND, lora.version) for lora in loras])
        if owner not in self._owners:
            self._owners[owner] = wanted
            for resource in wanted:
                self._residency.pin(resource)
        try:
            for lora, resource in zip(loras, wanted, strict=True):
                self._bring(lora, resource)
        except MaskserveError:
            self.let_go(owner)
            raise
        return tuple([each for each in wanted if self._residency.state(each) != "here"])

    def let_go(self, owner: str) -> None:
        """It has ended, or goes on without any."""
        for resource in self._owners.pop(owner, ()):
            self._residency.unpin(resource)

    def arrived(self, lora: Lora, loaded: LoadedLora) -> list[str]:
        """It can be used; the edits that wait for nothing more."""
        self.loads += 1
        self._observations.add("adapter_load_seconds", loaded.seconds)
        self._loaded[lora.version] = lora.name, loaded
        return self._residency.arrived(Resource(KIND, lora.version))

    def failed(self, lora: Lora, error: MaskserveError) -> list[str]:
        """It will not come; the edits that waited for it."""
        self.failures += 1
        return self._residency.failed(Resource(KIND, lora.version), error)

    def dropped(self, resource: Resource) -> None:
        """It has made room for another."""
        self._loaded.pop(resource.name, None)

    def digest(self, lora: Lora) -> str:
        """sha256 of the file of a LoRA that is here."""
        return self._loaded[lora.version][1].digest

    def names(self) -> tuple[str, ...]:
        """Of those on the device."""
        return tuple(sorted({name for name, _ in self._loaded.values()}))

    def nbytes(self) -> int:
        """Of those on the device."""
        return sum(loaded.nbytes for _, loaded in self._loaded.values())

    def steps_without(self, lora: Lora, sigmas: Sequence[tuple[float, float]]) -> int:
        """First steps of an edit that look the same without the LoRA, as it was profiled; 0 for one
        that was not.
        """
        until = self._profiles.get(lora.name, 2.0)
        return next((i for i, (sigma, _) in enumerate(sigmas) if sigma <= until), len(sigmas))

    def _bring(self, lora: Lora, resource: Resource) -> None:
        now = time.monotonic()
        if self._residency.state(resource) in ("here", "coming"):
            self._residency.touch(resource, now)
            return
        nbytes = self._loader.file_bytes(lora) * self._bytes_per_weight // 2
        if not self._residency.coming(resource, nbytes, now):
            raise Overloaded(
                f"SETTINGS.loras: there is no room for adapter {lora.name} beside those of the "
                "edits under way ([adapters] device_bytes); try again later"
            )
        self._loader.load(lora, lambda outcome: self._came(lora, outcome))


def used(request: EditRequest) -> tuple[Lora, ...]:
    """The LoRAs of an edit that change anything."""
    return tuple([lora for lora in request.loras if lora.scale])


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
