"""Loads of LoRAs by name into the executor, in threads beside the engine's."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from types import MappingProxyType

from maskserve_common.config import Config
from maskserve_common.contracts.request import Lora
from maskserve_common.contracts.status_record import LoadCost
from maskserve_common.files.adapter_folder import AdapterFile
from maskserve_common.resources.loading import Kind, Loaded, ResourceLoader
from maskserve_engine.adapters.lora_file import read_lora
from maskserve_engine.layers.low_rank import Factors
from maskserve_engine.stages.loader import dtype_of
from maskserve_lora.base_layers import BaseLayers
from maskserve_lora.catalogue import KnownAdapter
from maskserve_lora.store import AdapterStore

_log = logging.getLogger(__name__)

_THREADS = 2
"""Most loads at a time, those that wait for the storage included."""
_POLL_S = 1.0
"""Seconds between two looks at the catalogue and at the files on this host."""


LORAS = Kind(
    "lora",
    "adapter",
    "SETTINGS.loras",
    "[adapters] device_bytes",
    "adapter",
    # A read of 1 GB/s from memory; 100 MB/s and 0.1 s from the storage.
    MappingProxyType({"host": LoadCost(0.01, 1e-9), "storage": LoadCost(0.1, 1e-8)}),
)

Place = Callable[[str, Mapping[str, Factors]], int]
"""Puts a LoRA's updates, by layer, on the device under its version; returns their bytes there."""


def estimated_bytes(config: Config, half_bytes: int) -> int:
    """Return the estimated device bytes of factors that take `half_bytes` in half precision; the
    true number is known once they are loaded.
    """
    return half_bytes * dtype_of(config).itemsize // 2


class LoraLoader(ResourceLoader[Lora]):
    """Fetches files to the host, reads them, and passes their updates to the executor.

    Args:
        config: configuration of the worker.
        place: puts a LoRA's updates on the device; thread-safe.
    """

    def __init__(self, config: Config, place: Place) -> None:
        super().__init__(LORAS, _THREADS)
        self._config, self._place = config, place
        self._store = AdapterStore(config)
        self._host: tuple[AdapterFile, ...] = ()
        self._typical_bytes = 0.0
        self._closing = threading.Event()
        self._poller = threading.Thread(target=self._poll, name="adapters-on-host", daemon=True)
        self._poller.start()

    def close(self) -> None:
        self._closing.set()
        self._poller.join()
        self._store.close()
        super().close()

    def file_bytes(self, lora: Lora) -> int:
        """Return the size of its file in the catalogue, in bytes.

        Raises:
            MaskserveError: the LoRA is not served, or not any more.
        """
        return self._store.catalogue.find(lora.name, LORAS.setting).nbytes

    def half_bytes(self, lora: Lora) -> int:
        """Return the bytes of its factors in half precision, about; raises as `file_bytes`."""
        known = self._store.catalogue.find(lora.name, LORAS.setting)
        return known.product_bytes or known.nbytes

    def typical_bytes(self) -> float:
        """Return the mean bytes of the catalogue's files, from its content of at most a second ago;
        0: none is known.
        """
        return self._typical_bytes

    def on_host(self) -> tuple[AdapterFile, ...]:
        """Return the files that any process has put in host memory, least recently used first, as
        they were at most a second ago. It is the same object until the files change.
        """
        return self._host

    def _load_now(self, item: Lora, begin: float) -> Loaded:
        on_host = self._store.host.find(item.name, item.version) is not None
        file = self._store.fetch(item.name, item.version)
        parts = read_lora(file.path, self._base, self._config.model.path)
        factors = parts.get("denoiser", {})
        nbytes = self._place(item.version, factors)
        layers = {name: update.numbers for name, update in factors.items()}
        source, load_s = "host" if on_host else "storage", time.monotonic() - begin
        return Loaded(file.digest, nbytes, load_s, file.nbytes, source, layers)

    def _poll(self) -> None:
        known_adapters: Mapping[str, KnownAdapter] = {}
        while not self._closing.wait(_POLL_S):
            try:
                catalogue = self._store.catalogue.all()
                if catalogue is not known_adapters:
                    known_adapters, self._typical_bytes = catalogue, _mean_bytes(catalogue.values())
                host_files = tuple(self._store.host.files())
            except OSError as error:
                _log.warning("the folder of adapters cannot be read: %s", error)
                continue
            if [file.path for file in host_files] != [file.path for file in self._host]:
                self._host = host_files

    @cached_property
    def _base(self) -> BaseLayers:
        return BaseLayers.of_folder(self._config.model.path, self._config.model.gguf)


def _mean_bytes(adapters: Iterable[KnownAdapter]) -> float:
    sizes = [adapter.nbytes for adapter in adapters if not adapter.problem]
    return sum(sizes) / len(sizes) if sizes else 0.0
