"""Loads of resources to a device, in threads that no step waits for."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, NamedTuple, Protocol, TypeVar

from maskserve_common.contracts.status_record import LoadCost
from maskserve_common.errors import EngineFailed, InvalidRequest, MaskserveError, Overloaded

_log = logging.getLogger("maskserve")
NOT_LOADED = "could not be loaded"
"""Words of the error of a load that failed."""


class Loadable(Protocol):
    """A resource that an edit names, with the version that it had when the edit was accepted."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str:
        """Version of the resource's files."""
        ...


W = TypeVar("W", bound=Loadable)
W_contra = TypeVar("W_contra", bound=Loadable, contravariant=True)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of resource: LoRAs or ControlNets."""

    name: str
    """Name of the kind and of its budget."""
    noun: str
    """Name of a resource in messages."""
    setting: str
    """Setting by which an edit names resources, such as `SETTINGS.loras`."""
    budget: str
    """Configuration key of the budget."""
    metrics: str
    """Prefix of its metrics."""
    estimates: Mapping[str, LoadCost]
    """Load costs before any load was measured, by where the files are."""

    def counters(self) -> dict[str, int]:
        """Return zeros for the metrics that count this kind's loads, by name."""
        return {f"{self.metrics}_load_failures_total": 0, f"{self.metrics}_evictions_total": 0}


class Loaded(NamedTuple):
    """A resource that is ready for steps."""

    digest: str
    """sha256 of the weights' files, in order."""
    nbytes: int
    """Bytes on the device."""
    seconds: float
    """Seconds since the load was requested."""
    file_bytes: int = 0
    source: str = "storage"
    """Source of the files when the load was requested: a key of its kind's estimates."""
    layers: Mapping[str, int] = MappingProxyType({})
    """Numbers that it adds to the denoiser's layers, where known."""


Done = Callable[[Loaded | MaskserveError], None]
"""Callback with the outcome of a load, in any thread."""


class Source(Protocol[W_contra]):
    """Loader of a kind's resources."""

    def typical_bytes(self) -> float:
        """Return the mean bytes of the files of all known resources; 0: none is known."""
        ...

    def load(self, item: W_contra, done: Done) -> None: ...

    def close(self) -> None: ...


class ResourceLoader(ABC, Generic[W]):
    """Loads resources in threads, and converts exceptions of a load to errors for the client.

    Args:
        kind: kind of the resources.
        threads: most loads at a time.
    """

    def __init__(self, kind: Kind, threads: int = 1) -> None:
        self._kind = kind
        self._pool = ThreadPoolExecutor(threads, f"{kind.name}s")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def load(self, item: W, done: Done) -> None:
        """Start a load; `done` is called in another thread with its outcome."""
        self._pool.submit(self._load, item, done, time.monotonic())

    @abstractmethod
    def _load_now(self, item: W, begin: float) -> Loaded:
        """Load a resource to the device.

        Args:
            item: the resource.
            begin: time.monotonic time of the request.

        Raises:
            MaskserveError: its text goes to the client unchanged.
            ValueError: the resource cannot be served; its text continues a sentence that begins
                with the resource.
            FileNotFoundError: it was removed after the edit was accepted.
            MemoryError: there is no room for it.
        """

    def _load(self, item: W, done: Done, begin: float) -> None:
        kind = self._kind
        description = f"{kind.noun} {item.name}"
        try:
            outcome: Loaded | MaskserveError = self._load_now(item, begin)
        except MaskserveError as error:
            outcome = error
        except ValueError as error:
            outcome = InvalidRequest(kind.setting, f"{description} {error}")
        except (FileNotFoundError, MemoryError) as error:
            _log.warning("%s %s: %s", description, NOT_LOADED, error)
            outcome = Overloaded(f"{kind.setting}: {description} {NOT_LOADED} now; try again")
        except Exception:
            _log.exception("%s %s", description, NOT_LOADED)
            outcome = EngineFailed(f"{kind.setting}: {description} {NOT_LOADED}")
        done(outcome)
