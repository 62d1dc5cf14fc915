"""From an adapter's name to the executor that steps with it, off the engine's thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from maskserve_core.adapters.base_layers import BaseLayers
from maskserve_core.adapters.catalogue import KnownAdapter
from maskserve_core.adapters.folder import AdapterFile
from maskserve_core.adapters.lora_header import BadAdapter
from maskserve_core.adapters.store import AdapterStore
from maskserve_core.config import Config, ConfigError
from maskserve_core.contracts.request import Lora
from maskserve_core.errors import EngineFailed, InvalidRequest, MaskserveError, Overloaded
from maskserve_engine.adapters.lora_file import read_lora
from maskserve_engine.layers.low_rank import Factors

_log = logging.getLogger(__name__)

_AT_ONCE = 2
"""Files that are read at the same time; fetching them from the storage waits in these threads."""
_LOOK_EVERY_S = 1.0
_FIELD = "SETTINGS.loras"


class LoadedLora(NamedTuple):
    """A LoRA that rows can be stepped with."""

    digest: str
    """sha256 of its file."""
    nbytes: int
    """On the device."""
    seconds: float
    """From when it was asked for."""
    file_bytes: int = 0
    source: str = "host"
    """Where its file was when it was asked for: `host` or `storage`."""
    layers: Mapping[str, int] = MappingProxyType({})
    """Numbers in its factors, by the denoiser's layers."""


Bring = Callable[[str, Mapping[str, Factors]], int]
"""`Executor.bring`."""


class LoraLoader:
    """Brings files to the host, reads them, and hands their updates to the executor.

    Args:
        config: of the worker.
        bring: takes an adapter's updates, by its version; from any thread.
    """

    def __init__(self, config: Config, bring: Bring) -> None:
        self._config, self._bring = config, bring
        self._store = AdapterStore(config)
        self._pool = ThreadPoolExecutor(_AT_ONCE, "loras")
        self._host: tuple[AdapterFile, ...] = ()
        self._typical_bytes = 0.0
        self._closing = threading.Event()
        self._looks = threading.Thread(target=self._look, name="adapters-on-host", daemon=True)
        self._looks.start()

    def close(self) -> None:
        self._closing.set()
        self._looks.join()
        self._store.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def file_bytes(self, lora: Lora) -> int:
        """Of its file, as the catalogue has it.

        Raises:
            MaskserveError: it is not served, or no longer.
        """
        return self._store.catalogue.find(lora.name, _FIELD).nbytes

    def typical_bytes(self) -> float:
        """Of a file of the catalogue, on average; as of the last second. 0: none is known."""
        return self._typical_bytes

    def on_host(self) -> tuple[AdapterFile, ...]:
        """Files in the host's memory, whoever brought them, the least recently used first; as of
        the last second. The same object for as long as they are the same.
        """
        return self._host

    def load(self, lora: Lora, done: Callable[[LoadedLora | MaskserveError], None]) -> None:
        """Have it loaded; `done` is told in another thread what became of it."""
        self._pool.submit(self._load, lora, done, time.monotonic())

    def _load(
        self, lora: Lora, done: Callable[[LoadedLora | MaskserveError], None], begin: float
    ) -> None:
        try:
            there = self._store.host.find(lora.name, lora.version) is not None
            file = self._store.fetch(lora.name, lora.version)
            parts = read_lora(file.path, self._base, self._config.model.path)
            factors = parts.get("denoiser", {})
            nbytes = self._bring(lora.version, factors)
            source = "host" if there else "storage"
            taken = time.monotonic() - begin
            layers = {name: each.numbers for name, each in factors.items()}
            done(LoadedLora(file.digest, nbytes, taken, file.nbytes, source, layers))
        except MaskserveError as error:
            done(error)
        except (BadAdapter, ValueError) as error:
            done(InvalidRequest(_FIELD, f"adapter {lora.name} {error}"))
        except (FileNotFoundError, MemoryError) as error:
            # It was evicted from the host between two of our looks, or there is no room.
            _log.warning("adapter %s could not be loaded: %s", lora.name, error)
            done(Overloaded(f"{_FIELD}: adapter {lora.name} could not be loaded now; try again"))
        except Exception:
            _log.exception("adapter %s could not be loaded", lora.name)
            done(EngineFailed(f"{_FIELD}: adapter {lora.name} could not be loaded"))

    def _look(self) -> None:
        known: Mapping[str, KnownAdapter] = {}
        while not self._closing.wait(_LOOK_EVERY_S):
            try:
                catalogue = self._store.catalogue.all()
                if catalogue is not known:
                    known, self._typical_bytes = catalogue, _mean_bytes(catalogue.values())
                found = tuple(self._store.host.held())
            except OSError as error:
                _log.warning("the folder of adapters cannot be read: %s", error)
                continue
            if [each.path for each in found] != [each.path for each in self._host]:
                self._host = found

    @cached_property
    def _base(self) -> BaseLayers:
        found = BaseLayers.of_folder(self._config.model.path)
        if found is None:
            raise ConfigError(f"{self._config.model.path}: no layers that an adapter could change")
        return found


def _mean_bytes(adapters: Iterable[KnownAdapter]) -> float:
    """Of the files that are served."""
    sizes = [each.nbytes for each in adapters if not each.problem]
    return sum(sizes) / len(sizes) if sizes else 0.0
