"""Loading of adapters to this host: storage, disk folder, folder in memory.

A file is loaded once; concurrent requests wait for it. It is written whole or not at all. Its
values are checked, and its sha256 is taken on the way and compared at each later copy. A faulty
adapter fails its own edits only.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from maskserve_common.config import AdaptersConfig, Config
from maskserve_common.contracts.keys import ADAPTER_NAME
from maskserve_common.errors import AdapterNotFound, InvalidRequest, MaskserveError, Overloaded
from maskserve_common.files.adapter_folder import AdapterFile, AdapterFolder, NoRoom
from maskserve_common.files.safetensors_header import reader_of
from maskserve_lora.base_layers import BaseLayers
from maskserve_lora.catalogue import Catalogue, KnownAdapter
from maskserve_lora.lora_header import BadAdapter, config_of, read_tensors, with_config
from maskserve_lora.lora_plan import check_file
from maskserve_lora.storage import (
    CHUNK_BYTES,
    FOLDER_FILES,
    SUFFIX,
    Storage,
    StorageFailed,
    why_no_name,
)

log = logging.getLogger("maskserve")

_AT_ONCE = 4
"""Most files that a process copies at the same time."""


class AdapterStore:
    """The adapters that edits may name, and their files on this host.

    Args:
        config: configuration of the worker.
        storage: storage of the adapters; by default that of `[adapters] store`.
    """

    def __init__(self, config: Config, storage: Storage | None = None) -> None:
        adapters = config.adapters
        self._config = config
        self._storage = storage or Storage(adapters.store, adapters.timeout_s)
        self.host = AdapterFolder(host_folder(config), adapters.host_bytes)
        self.disk = (
            AdapterFolder(adapters.disk_dir, adapters.disk_bytes) if adapters.disk_dir else None
        )
        self.catalogue = Catalogue(config, self.host.folder, self._storage)
        self._pool = ThreadPoolExecutor(_AT_ONCE, "adapter-fetch")
        self._fetching: set[str] = set()
        self._closing = threading.Event()
        self._scanner: threading.Thread | None = None

    def start(self) -> None:
        """Keep the catalogue up to date in the background; without a store nothing is done."""
        if self._config.adapters.store and self._scanner is None:
            self._scanner = threading.Thread(target=self._scan, name="adapter-scan", daemon=True)
            self._scanner.start()

    def close(self) -> None:
        self._closing.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def begin(self, name: str, version: str) -> None:
        """Fetch an adapter in the background, as `fetch`; its edits wait for the file."""
        if version not in self._fetching:
            self._fetching.add(version)
            self._pool.submit(self._prefetch, name, version)

    def fetch(self, name: str, version: str, field: str = "SETTINGS.loras") -> AdapterFile:
        """Return the file of an adapter in the host's memory; blocks until it is there.

        Args:
            name: name of the adapter.
            version: version with which the edit was accepted.
            field: name of the field in errors.

        Raises:
            AdapterNotFound: it is gone.
            InvalidRequest: the file is bad.
            Overloaded: the storage does not answer, the file is being replaced, or there is no room
                for it.
        """
        file = self.host.find(name, version)
        if file is not None:
            return file
        try:
            with self.host.write_lock(name, version, self._patience_s(name)):
                return self.host.find(name, version) or self._fetched(name, version, field)
        except TimeoutError:
            raise Overloaded(f"{field}: adapter {name} takes too long to fetch") from None
        except (StorageFailed, NoRoom) as error:
            log.warning("adapter %s cannot be fetched: %s", name, error)
            raise Overloaded(f"{field}: adapter {name} cannot be fetched now: {error}") from error
        except BadAdapter as error:
            raise InvalidRequest(field, f"adapter {name} {error}") from error

    def checked(self, adapter: KnownAdapter, field: str) -> str:
        """Check every weight of a file, wherever it lies, and return its sha256. The check copies
        it to no folder of this host, and does not count as a use.

        Raises:
            MaskserveError: as `fetch`.
        """
        for file in self.host.files():
            if (file.name, file.version) == (adapter.name, adapter.version):
                return file.digest  # checked when it was loaded
        digest = hashlib.sha256()
        try:
            _, chunks = self._whole(adapter)
            with tempfile.NamedTemporaryFile(suffix=SUFFIX) as copy:
                for chunk in chunks:
                    copy.write(chunk)
                    digest.update(chunk)
                copy.flush()
                self._check(Path(copy.name))
        except (StorageFailed, OSError) as error:
            raise Overloaded(f"{field}: adapter {adapter.name} cannot be read: {error}") from error
        except BadAdapter as error:
            raise InvalidRequest(field, f"adapter {adapter.name} {error}") from error
        return digest.hexdigest()

    def forget(self, name: str) -> int:
        """Remove an adapter's files from this host; returns the bytes that were freed."""
        return self.host.remove(name) + (0 if self.disk is None else self.disk.remove(name))

    def _fetched(self, name: str, version: str, field: str) -> AdapterFile:
        """Copy a file from the disk, or else from the storage."""
        on_disk = None if self.disk is None else self.disk.find(name, version)
        if on_disk is not None:
            fetched = self._from_disk(on_disk)
            if fetched is not None:
                return fetched
        adapter = self.catalogue.find(name, field)
        if adapter.version != version:
            raise _replaced(name, field)
        self._check_unchanged(adapter, field)
        nbytes, chunks = self._whole(adapter)
        file = self.host.write(name, version, nbytes, chunks, self._check)
        try:
            self._check_unchanged(adapter, field)  # else its pieces may be of two files
        except (MaskserveError, StorageFailed):
            file.path.unlink(missing_ok=True)
            raise
        if self.disk is not None:
            try:
                with self.disk.write_lock(name, version, 0.0):
                    self.disk.write(name, version, file.nbytes, _pieces(file.path))
            except (NoRoom, TimeoutError) as error:
                log.warning("adapter %s is not kept on disk: %s", name, error)
        return file

    def _whole(self, adapter: KnownAdapter) -> tuple[int, Iterator[bytes]]:
        """Return the adapter's length in bytes on this host, and its data in pieces."""
        return self._storage.whole(
            adapter.path, adapter.nbytes, adapter.config, adapter.config_bytes
        )

    def _check(self, path: Path) -> None:
        check_file(path, self.catalogue.base_layers())

    def _from_disk(self, on_disk: AdapterFile) -> AdapterFile | None:
        """Copy a file from the disk to memory; None: it is damaged, and dropped."""

        def check_digest(path: Path) -> None:
            digest = hashlib.sha256()
            for piece in _pieces(path):
                digest.update(piece)
            if digest.hexdigest() != on_disk.digest:
                raise ValueError("its digest is another")

        try:
            return self.host.write(
                on_disk.name, on_disk.version, on_disk.nbytes, _pieces(on_disk.path), check_digest
            )
        except (ValueError, FileNotFoundError) as error:
            log.warning("%s is dropped: %s", on_disk.path, error)
            on_disk.path.unlink(missing_ok=True)
            return None

    def _check_unchanged(self, adapter: KnownAdapter, field: str) -> None:
        stored = self._storage.stat(adapter.path)
        if stored is not None and stored.version == adapter.version:
            return
        self.catalogue.scan(at_once=True, wait=False)
        if stored is None:
            raise AdapterNotFound(f"{field}: adapter {adapter.name} is gone")
        raise _replaced(adapter.name, field)

    def _patience_s(self, name: str) -> float:
        """Return the seconds in which another process must load a file if its storage answers each
        call in time.
        """
        adapter = self.catalogue.all().get(name)
        pieces = 1 + (adapter.nbytes // CHUNK_BYTES if adapter else 0)
        return (pieces + 4) * self._config.adapters.timeout_s

    def _prefetch(self, name: str, version: str) -> None:
        try:
            self.fetch(name, version)
        except MaskserveError:
            pass  # the edit that needs it gets the error
        except Exception:
            log.exception("adapter %s could not be fetched", name)
        finally:
            self._fetching.discard(version)

    def _scan(self) -> None:
        while not self._closing.is_set():
            try:
                self.catalogue.scan()
            except Exception:
                log.exception("the adapters could not be listed")
            self._closing.wait(self._config.adapters.rescan_s)


def host_folder(config: Config) -> Path:
    """Return the folder of adapter files that are ready for use."""
    return Path(config.adapters.host_dir or Path(config.runtime_dir) / "adapters")


def describe_file(
    path: Path, model: str | Path | None = None, gguf: str = "", *, fused: bool = False
) -> dict[str, Any]:
    """Check a LoRA that no worker serves yet to its last weight, and describe it.

    Args:
        path: a LoRA file, or PEFT's or diffusers' folder of one.
        model: folder of its model; None: the fit is not checked.
        gguf: file whose weights replace the model's transformer; empty: none.
        fused: whether it is fused into the weights: a DoRA, an OFT or any rank is then served.

    Raises:
        BadAdapter: it would not be served.
        OSError: it cannot be read.
    """
    path = adapter_file(path)
    in_folder = path.name in FOLDER_FILES
    name = path.resolve().parent.name if in_folder else path.name
    if name.lower().endswith(SUFFIX):
        name = name[: -len(SUFFIX)]
    if ADAPTER_NAME.fullmatch(name) is None:
        raise BadAdapter(why_no_name(name))
    limits = AdaptersConfig()
    base = None if model is None else BaseLayers.of_folder(model, gguf)
    max_rank = sys.maxsize if fused else limits.max_rank
    header, plan = check_file(
        path, base, max_bytes=limits.max_bytes, max_rank=max_rank, fused=fused
    )
    return {
        "name": name,
        "bytes": header.nbytes,
        "rank": header.rank,
        "parts": list(plan.parts),
        "notes": list(plan.notes),
        "digest": _local_digest(path),
    }


def adapter_file(path: Path) -> Path:
    """Return the file of an adapter that is given as a file, or as PEFT's or diffusers' folder.

    Raises:
        BadAdapter: the folder has none, or several.
    """
    if not path.is_dir():
        return path
    for name in FOLDER_FILES:
        if (path / name).is_file():
            return path / name
    file_names = sorted(file.name for file in path.iterdir() if file.suffix.lower() == SUFFIX)
    if len(file_names) == 1:
        return path / file_names[0]
    if not file_names:
        raise BadAdapter(f"is a folder without {' or '.join(FOLDER_FILES)}")
    listed_names = ", ".join(file_names[:3]) + (
        f" and {len(file_names) - 3} more" if len(file_names) > 3 else ""
    )
    raise BadAdapter(f"is a folder of several files, each an adapter of its own: {listed_names}")


def _local_digest(path: Path) -> str:
    """Return the sha256 that a file will have on a host (`Storage.whole`)."""
    digest, config = hashlib.sha256(), config_of(path)
    with path.open("rb") as handle:
        if config:
            header = read_tensors(reader_of(handle), path.stat().st_size)
            digest.update(with_config(header, config))
            handle.seek(header.begin)
        while piece := handle.read(CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _replaced(name: str, field: str) -> MaskserveError:
    return Overloaded(f"{field}: adapter {name} has just been replaced; send the edit again")


def _pieces(path: Path) -> Iterator[bytes]:
    with contextlib.closing(path.open("rb")) as handle:
        while piece := handle.read(CHUNK_BYTES):
            yield piece
