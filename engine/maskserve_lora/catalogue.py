"""The catalogue of adapters: one file, which the workers of a host share.

Listing thousands of adapters and reading their headers takes seconds or minutes. So one process of
the host does it for all, in the background. Files with equal headers share one reading, even under
other names and versions. Finding a name calls no storage.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from maskserve_common.config import Config
from maskserve_common.errors import AdapterNotFound, InvalidRequest, Overloaded
from maskserve_common.files.safetensors_header import head_of
from maskserve_common.files.store import FileStore
from maskserve_lora.base_layers import BaseLayers
from maskserve_lora.header_process import Bounds, HeaderDescription, HeaderProcess
from maskserve_lora.lora_header import BadAdapter
from maskserve_lora.storage import Storage, StorageFailed, Stored

log = logging.getLogger("maskserve")

_FORMAT = 6


class KnownAdapter(msgspec.Struct, frozen=True):
    """An adapter as the storage has it."""

    name: str
    path: str
    """Path in the storage."""
    version: str
    """Version in 32 hexadecimal digits, which changes when the file is replaced. It names the
    adapter's bytes before they are read; their sha256 is known once they are on the host."""
    nbytes: int
    rank: int = 0
    """Largest rank of its layers."""
    parts: tuple[str, ...] = ()
    """Parts of the model that it changes, of `lora_header.PARTS`."""
    problem: str = ""
    """Reason why it is not served; empty if it is."""
    notes: tuple[str, ...] = ()
    """Notes on skipped parts and on assumptions (`lora_plan.LoraPlan.notes`)."""
    product_bytes: int = 0
    """As in `lora_header.LoraHeader`."""
    config: str = ""
    """Path in the storage of PEFT's configuration; empty: there is none."""
    config_bytes: int = 0
    hides: str = ""
    """As in `Stored`."""
    header: str = ""
    """Digest of everything that the description depends on: files of equal digest have equal
    descriptions."""

    def check(self, field: str) -> None:
        """Check that the adapter is served.

        Raises:
            InvalidRequest: it is not; the error names `field`.
        """
        if self.problem:
            raise InvalidRequest(field, f"adapter {self.name} {self.problem}")


class _Listing(msgspec.Struct, frozen=True):
    """Content of the catalogue's file."""

    adapters: dict[str, KnownAdapter]
    whole: bool
    """Whether the listing of the storage is complete."""
    problem: str = ""
    """Reason why the last listing failed."""
    format: int = _FORMAT


class Catalogue:
    """The adapters of `[adapters] store`.

    Args:
        config: configuration of the worker.
        folder: folder of the file, shared by processes that serve the same model.
        storage: storage of the adapters.
        save_every_s: seconds between two writes of the file while the storage is read.
    """

    def __init__(
        self, config: Config, folder: Path, storage: Storage, save_every_s: float = 1.0
    ) -> None:
        self._save_every_s = save_every_s
        self._config = config
        self._storage = storage
        model, adapters = config.model, config.adapters
        bounds = Bounds(model.path, model.gguf, adapters.max_bytes, adapters.max_rank)
        served = (msgspec.structs.astuple(bounds), adapters.store, adapters.host_bytes)
        name = hashlib.sha256(repr(served).encode()).hexdigest()[:16]
        self._store, self._file = FileStore(folder), folder / f"catalogue-{name}.json"
        self._listing = _Listing({}, whole=False)
        self._listing_version: tuple[int, int] | None = None
        """Time and inode of the file that `_page` was read from."""
        self._base: BaseLayers | None = None
        self._headers = HeaderProcess(bounds)

    def all(self) -> Mapping[str, KnownAdapter]:
        """Return all adapters by name, from the last scan of any process."""
        return self._current().adapters

    @property
    def problem(self) -> str:
        """Reason why the storage could not be listed; empty if it could."""
        return self._current().problem

    def find(self, name: str, field: str = "SETTINGS.loras") -> KnownAdapter:
        """Return the adapter of this name, without a call of the storage.

        Raises:
            AdapterNotFound: there is none.
            InvalidRequest: the adapter is not served, or no adapters are.
            Overloaded: the storage has not been listed yet, or does not answer.
        """
        if not self._config.adapters.store:
            raise InvalidRequest(field, "adapters are not served here", "no adapters")
        listing = self._current()
        adapter = listing.adapters.get(name)
        if adapter is None:
            if listing.problem:
                raise Overloaded(
                    f"{field}: the adapters' storage does not answer: {listing.problem}"
                )
            if not listing.whole:
                raise Overloaded(f"{field}: the adapters' storage is still being listed")
            raise AdapterNotFound(f"{field}: there is no adapter {name}")
        adapter.check(field)
        return adapter

    def scan(self, *, at_once: bool = False, wait: bool = True) -> None:
        """List the storage, unless another process has just done so; blocks.

        Args:
            at_once: whether to list it even if another process has just done so.
            wait: whether to wait while another process lists it; otherwise that listing is enough.
        """
        with (
            contextlib.suppress(TimeoutError),
            self._store.write_lock(self._file.name, math.inf if wait else 0.0),
        ):
            # If the clock was set back, the last scan lies in the future: list again.
            age = time.time() - self._written_at()
            if not at_once and 0 <= age < self._config.adapters.rescan_s:
                return
            adapters = self._current().adapters
            try:
                files = self._storage.files()
            except StorageFailed as error:
                if not self._current().problem:
                    log.warning("the adapters' storage cannot be listed: %s", error)
                self._write(_Listing(dict(adapters), self._current().whole, str(error)))
                return
            try:
                self._update(files, adapters)
            finally:
                self._headers.close()

    def _update(self, files: Mapping[str, Stored], known: Mapping[str, KnownAdapter]) -> None:
        """Describe the new files and write all adapters to the catalogue's file, now and then also
        before all are described.
        """
        adapters = {
            name: known[name]
            for name, stored in files.items()
            if name in known
            and (known[name].version, known[name].hides) == (stored.version, stored.hides)
        }
        by_header = {
            known_adapter.header: known_adapter
            for known_adapter in known.values()
            if known_adapter.header
        }
        saved, problem = time.monotonic(), ""
        for name, stored in files.items():
            if name in adapters:
                continue
            try:
                adapter = adapters[name] = self._describe(stored, by_header)
                by_header[adapter.header] = adapter
            except StorageFailed as error:
                problem = f"{name}: {error}"
                continue  # the next scan tries again
            if time.monotonic() - saved > self._save_every_s:
                self._write(_Listing({**adapters}, whole=False))
                saved = time.monotonic()
        self._write(_Listing(adapters, whole=not problem, problem=problem))

    def _describe(self, stored: Stored, by_header: Mapping[str, KnownAdapter]) -> KnownAdapter:
        """Describe a file by its header, with the reason if it is refused. A description with an
        equal header is used again, so that a bad header costs its time once.
        """
        limits = self._config.adapters
        plain = KnownAdapter(
            stored.name,
            stored.path,
            stored.version,
            stored.nbytes,
            config=stored.config,
            config_bytes=stored.config_bytes,
            hides=stored.hides,
        )
        try:
            if stored.problem:
                raise BadAdapter(stored.problem)
            if stored.nbytes > limits.host_bytes:
                raise BadAdapter(
                    f"is {stored.nbytes} bytes long; [adapters] host_bytes is {limits.host_bytes}"
                )
        except BadAdapter as error:
            return msgspec.structs.replace(plain, problem=str(error))
        config = b""
        if stored.config:
            config = self._storage.read(stored.config, 0, stored.config_bytes)
        head = head_of(
            lambda begin, end: self._storage.read(stored.path, begin, end), stored.nbytes
        )
        digest = hashlib.sha256(msgspec.msgpack.encode((head, stored.nbytes, config))).hexdigest()
        if (twin := by_header.get(digest)) is not None:
            description = HeaderDescription(
                twin.rank, twin.parts, twin.notes, twin.problem, twin.product_bytes
            )
        else:
            description = self._headers.describe(head, stored.nbytes, config)
        return msgspec.structs.replace(plain, header=digest, **msgspec.structs.asdict(description))

    def base_layers(self) -> BaseLayers:
        """Return the layers of the served model.

        Raises:
            BadAdapter: it has none that an adapter could change.
            OSError: they cannot be read.
        """
        if self._base is None:
            model = self._config.model
            self._base = BaseLayers.of_folder(model.path, model.gguf)
        return self._base

    def _current(self) -> _Listing:
        """Return the file's content, read again if another process has written it."""
        try:
            stat = self._file.stat()
            version = (stat.st_mtime_ns, stat.st_ino)
            if version != self._listing_version:
                listing = _decode(self._file.read_bytes())
                if listing.format == _FORMAT:
                    self._listing, self._listing_version = listing, version
        except FileNotFoundError:
            pass
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("%s cannot be read: %s", self._file, error)
        return self._listing

    def _written_at(self) -> float:
        """Return the time of the last scan, in seconds since 1970; 0: there was none."""
        try:
            return self._file.stat().st_mtime
        except OSError:
            return 0.0

    def _write(self, listing: _Listing) -> None:
        self._store.write(self._file.name, msgspec.json.encode(listing))


_decode = msgspec.json.Decoder(_Listing).decode
