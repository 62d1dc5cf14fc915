"""Storage of adapters: a folder, or a URL that fsspec takes (s3://, gs://, https://, ...).

    NAME.safetensors                             NAME; the suffix in any case
    NAME/pytorch_lora_weights.safetensors        NAME, as diffusers' and PEFT's folders
    A/NAME.safetensors                           A--NAME, and so on, as the hub's client has it
    A/NAME/pytorch_lora_weights.safetensors      the same

No call waits for the storage longer than its timeout: it runs on a thread of its own, which stays
behind if the storage is silent. The number of such stuck threads is bounded.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

from maskserve_common.contracts.keys import ADAPTER_NAME
from maskserve_common.files.safetensors_header import short
from maskserve_lora.lora_header import (
    CONFIG_FILE,
    MAX_CONFIG_BYTES,
    PEFT_FILE,
    read_tensors,
    with_config,
)

CHUNK_BYTES = 8 * 2**20

JOINT = "--"
"""Separator of folders in a name."""
DEPTH = 4
"""Most parts of a path in the storage; deeper files are not searched."""
FOLDER_FILES = ("pytorch_lora_weights.safetensors", PEFT_FILE)
"""File names in a folder that is an adapter; the first of these that exists."""
PICKLED_FILES = ("pytorch_lora_weights.bin", "adapter_model.bin")
"""Their older forms, which are listed and not served: reading them may run code."""
SUFFIX = ".safetensors"
# Properties by which file systems tell that a file has been replaced.
_STAMPS = ("ETag", "etag", "checksum", "md5", "md5Hash", "generation", "version_id", "crc32c")
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified")
_MOST_STUCK = 16

_R = TypeVar("_R")


class StorageFailed(Exception):
    """The storage does not answer, or not as expected; the text says how."""


class Stored(NamedTuple):
    """A file of the storage."""

    name: str
    """Name of the adapter."""
    path: str
    nbytes: int
    version: str
    """Version in 32 hexadecimal digits, which changes when the file is replaced."""
    config: str = ""
    """Path of PEFT's configuration; empty: there is none."""
    config_bytes: int = 0
    problem: str = ""
    """Reason, found in its name, why it is not served; else empty."""
    hides: str = ""
    """File of another folder that has the same name, and is therefore not served; empty: none."""


class Storage:
    """A folder of adapters, as remote storage.

    Args:
        url: URL of the folder; the file system's own options come from its usual environment.
        timeout_s: seconds for each call, and for each 8 MiB of a file.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = url
        self._timeout_s = timeout_s
        self._opened: tuple[Any, str] | None = None
        self._calls = threading.BoundedSemaphore(_MOST_STUCK)

    def files(self) -> dict[str, Stored]:
        """Return all adapters, by name.

        Raises:
            StorageFailed: they cannot be listed in time.
        """
        files: dict[str, Stored] = {}
        for stored in self._within("listing", self._list):
            hidden, (_, root) = files.get(stored.name), self._file_system()
            if hidden and hidden.path.rpartition("/")[0] != stored.path.rpartition("/")[0]:
                stored = stored._replace(hides=hidden.path.removeprefix(root).strip("/"))
            files[stored.name] = stored
        return files

    def stat(self, path: str) -> Stored | None:
        """Return the present state of a file of `files`; None: the file is gone.

        Raises:
            StorageFailed: no answer in time.
        """

        def look() -> Stored | None:
            file_system, root = self._file_system()
            file_system.invalidate_cache()
            try:
                config_path = f"{path.rpartition('/')[0]}/{CONFIG_FILE}"
                infos = {path: file_system.info(path)}
                if path.endswith(f"/{PEFT_FILE}") and file_system.exists(config_path):
                    infos[config_path] = file_system.info(config_path)
            except FileNotFoundError:
                return None
            return _stored(path, root, infos)

        return self._within("looking at a file", look)

    def read(self, path: str, begin: int, end: int) -> bytes:
        """Return bytes [begin, end) of a file.

        Raises:
            StorageFailed: they do not come in time, or there are fewer.
        """
        file_system, _ = self._file_system()
        data: bytes = self._within(
            "reading", lambda: file_system.cat_file(path, start=begin, end=end)
        )
        if len(data) != end - begin:
            raise StorageFailed(f"it gave {len(data)} of {end - begin} bytes")
        return data

    def whole(
        self, path: str, nbytes: int, config: str = "", config_bytes: int = 0
    ) -> tuple[int, Iterator[bytes]]:
        """Return the bytes of a file and its pieces, with PEFT's configuration in its header if one
        lies beside it, so that both are one file on this host. Arguments are as `Stored` has them.

        Raises:
            StorageFailed: as `read`.
            BadAdapter: it is not a safetensors file.
        """
        if not config:
            return nbytes, self.chunks(path, nbytes)
        header = read_tensors(lambda begin, end: self.read(path, begin, end), nbytes)
        head = with_config(header, self.read(config, 0, config_bytes))
        tensors = self.chunks(path, nbytes, header.begin)
        return len(head) + nbytes - header.begin, itertools.chain((head,), tensors)

    def chunks(self, path: str, nbytes: int, begin: int = 0) -> Iterator[bytes]:
        """Yield a file from a byte on, piece by piece.

        Raises:
            StorageFailed: as `read`.
        """
        for first in range(begin, nbytes, CHUNK_BYTES):
            yield self.read(path, first, min(first + CHUNK_BYTES, nbytes))

    def _file_system(self) -> tuple[Any, str]:
        """Return fsspec's file system and the folder in it."""
        if self._opened is None:
            # Workers have it; the client, which imports this package's other modules, may not.
            import fsspec

            self._opened = fsspec.core.url_to_fs(self.url)
        return self._opened

    def _list(self) -> list[Stored]:
        file_system, root = self._file_system()
        file_system.invalidate_cache()
        listing = _files_below(file_system, root, DEPTH)
        if not listing and not file_system.exists(root):
            raise StorageFailed(f"there is no folder {self.url}")
        adapters = (_stored(path, root, listing) for path in sorted(listing, key=_precedence))
        return [stored for stored in adapters if stored is not None]

    def _within(self, action: str, call: Callable[[], _R]) -> _R:
        """Return what `call` returns, if it does so in time."""
        if not self._calls.acquire(blocking=False):
            raise StorageFailed(f"{_MOST_STUCK} calls wait for it already")
        ended: list[tuple[_R | None, Exception | None]] = []
        finished = threading.Event()

        def run() -> None:
            try:
                ended.append((call(), None))
            except Exception as error:  # each file system has errors of its own
                ended.append((None, error))
            finally:
                self._calls.release()
                finished.set()

        threading.Thread(target=run, name="adapter-storage", daemon=True).start()
        if not finished.wait(self._timeout_s):
            raise StorageFailed(f"no answer within {self._timeout_s:g} s ({action})")
        result, error = ended[0]
        if isinstance(error, StorageFailed):
            raise error
        if error is not None:
            raise StorageFailed(f"{type(error).__name__}: {error} ({action})") from error
        return result  # type: ignore[return-value]


def why_no_name(name: str) -> str:
    """Return the error message for a name that cannot be served."""
    return (
        f"has a name that is not served: {short(name)!r}; rename it to letters of A to Z, digits, "
        "'.', '_' and '-', up to 128"
    )


def _files_below(file_system: Any, folder: str, depth: int) -> dict[str, dict[str, Any]]:
    """Return the file system's information on a folder's files, by path, also behind links."""
    listing: dict[str, dict[str, Any]] = file_system.find(folder, maxdepth=depth, detail=True)
    links = [path for path, info in listing.items() if info.get("islink")]
    for path in links:
        with contextlib.suppress(FileNotFoundError):
            info = listing[path] = file_system.info(path)  # of the target
            deeper = depth - path.removeprefix(folder).strip("/").count("/") - 1
            if info["type"] == "directory" and deeper:
                listing |= _files_below(file_system, path, deeper)
    return listing


def _precedence(path: str) -> tuple[int, str]:
    """Sort key: NAME.safetensors comes last, and so wins over a folder NAME."""
    file = path.rpartition("/")[2]
    if file in PICKLED_FILES:
        return -len(FOLDER_FILES), path
    return -FOLDER_FILES.index(file) if file in FOLDER_FILES else 1, path


def _stored(path: str, root: str, listing: Mapping[str, Mapping[str, Any]]) -> Stored | None:
    """Return the adapter that a file belongs to; None: another file.

    Args:
        path: path in `listing`.
        root: root of the storage.
        listing: the file system's information on its files.
    """
    info = listing[path]
    inside = unquote(f"/{path.lstrip('/')}").removeprefix(f"/{root.strip('/')}").strip("/")
    *folders, file = inside.split("/")
    if info.get("type") == "directory" or any(part.startswith(".") for part in (*folders, file)):
        return None
    stem, suffix = file[: -len(SUFFIX)], file[-len(SUFFIX) :]
    is_pickled = bool(folders) and file in PICKLED_FILES
    if not is_pickled and (not stem or suffix.lower() != SUFFIX):
        return None
    is_folder = is_pickled or (folders and file in FOLDER_FILES)
    name = JOINT.join(folders if is_folder else (*folders, stem))
    nbytes, version_parts = int(info.get("size") or 0), [inside, *_stamps(info)]
    config_path = f"{path.rpartition('/')[0]}/{CONFIG_FILE}"
    config = config_path if file == PEFT_FILE and config_path in listing else ""
    config_bytes = int(listing[config].get("size") or 0) if config else 0
    if config:
        version_parts += _stamps(listing[config])
    problem = why_no_name(name) if ADAPTER_NAME.fullmatch(name) is None else ""
    if is_pickled:
        problem = f"is {file}, of a format that may run code; save it as safetensors"
    if config_bytes > MAX_CONFIG_BYTES:
        problem = f"has an {CONFIG_FILE} of {config_bytes} bytes; at most {MAX_CONFIG_BYTES}"
    version = hashlib.sha256(
        "\0".join(version_parts).encode("utf-8", "surrogateescape")
    ).hexdigest()[:32]
    return Stored(name, path, nbytes, version, config, config_bytes, problem)


def _stamps(info: Mapping[str, Any]) -> list[str]:
    """Return the properties that differ after the file has been replaced."""
    stamp = [str(info[key]) for key in _STAMPS if info.get(key)]
    stamp = stamp or [str(info[key]) for key in _TIMES if info.get(key)]
    return [str(int(info.get("size") or 0)), *stamp]
