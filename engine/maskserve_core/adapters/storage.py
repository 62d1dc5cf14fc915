"""Where adapters come from: a folder, or a URL that fsspec takes (s3://, gs://, https://, ...).

No call waits for the storage longer than its time: it runs on a thread of its own, which is left
behind if the storage is silent. Few such threads may be stuck at once.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""The form of an adapter's name: it can lead to no other folder."""
CHUNK_BYTES = 8 * 2**20

_FOLDER_FILE = "pytorch_lora_weights.safetensors"
_SUFFIX = ".safetensors"
# What file systems say of a file that is another after the file has been replaced.
_STAMPS = ("ETag", "etag", "checksum", "md5", "md5Hash", "generation", "version_id", "crc32c")
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified")
_MOST_STUCK = 16

_R = TypeVar("_R")


class StorageFailed(Exception):
    """The storage does not answer, or not as it should; the text says how."""


class Stored(NamedTuple):
    """A file of the storage."""

    name: str
    """Of the adapter."""
    path: str
    nbytes: int
    version: str
    """32 hexadecimal digits: others after the file has been replaced."""


class Storage:
    """A folder of adapters, seen from outside.

    Args:
        url: of the folder; the file system's own options come from its usual environment.
        timeout_s: for each call, and for each 8 MiB of a file.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = url
        self._timeout_s = timeout_s
        self._opened: tuple[Any, str] | None = None
        self._calls = threading.BoundedSemaphore(_MOST_STUCK)

    def files(self) -> dict[str, Stored]:
        """All adapters, by name.

        Raises:
            StorageFailed: they cannot be listed in time.
        """
        return {stored.name: stored for stored in self._within("listing", self._list)}

    def stat(self, path: str) -> Stored | None:
        """A file of `files` as it is now; None: it is gone.

        Raises:
            StorageFailed: no answer in time.
        """

        def look() -> Stored | None:
            files, root = self._files()
            files.invalidate_cache()
            try:
                about = files.info(path)
            except FileNotFoundError:
                return None
            return _stored(path, root, about)

        return self._within("looking at a file", look)

    def read(self, path: str, begin: int, end: int) -> bytes:
        """Bytes [begin, end) of a file.

        Raises:
            StorageFailed: they do not come in time, or there are fewer.
        """
        files, _ = self._files()
        data: bytes = self._within("reading", lambda: files.cat_file(path, start=begin, end=end))
        if len(data) != end - begin:
            raise StorageFailed(f"it gave {len(data)} of {end - begin} bytes")
        return data

    def chunks(self, path: str, nbytes: int) -> Iterator[bytes]:
        """A whole file, piece by piece.

        Raises:
            StorageFailed: as `read`.
        """
        for begin in range(0, nbytes, CHUNK_BYTES):
            yield self.read(path, begin, min(begin + CHUNK_BYTES, nbytes))

    def _files(self) -> tuple[Any, str]:
        """Fsspec's file system and the folder in it."""
        if self._opened is None:
            # Workers have it; the client, which imports this package's other modules, may not.
            import fsspec

            self._opened = fsspec.core.url_to_fs(self.url)
        return self._opened

    def _list(self) -> list[Stored]:
        files, root = self._files()
        files.invalidate_cache()
        found: dict[str, dict[str, Any]] = files.find(root, maxdepth=2, detail=True)
        if not found and not files.exists(root):
            raise StorageFailed(f"there is no folder {self.url}")
        each = (_stored(path, root, about) for path, about in sorted(found.items()))
        # NAME.safetensors wins over a folder NAME: it is sorted last, behind "NAME/".
        return [stored for stored in each if stored is not None]

    def _within(self, doing: str, call: Callable[[], _R]) -> _R:
        """What `call` returns, if it does so in time."""
        if not self._calls.acquire(blocking=False):
            raise StorageFailed(f"{_MOST_STUCK} calls wait for it already")
        ended: list[tuple[_R | None, Exception | None]] = []
        done = threading.Event()

        def run() -> None:
            try:
                ended.append((call(), None))
            except Exception as error:  # each file system has errors of its own
                ended.append((None, error))
            finally:
                self._calls.release()
                done.set()

        threading.Thread(target=run, name="adapter-storage", daemon=True).start()
        if not done.wait(self._timeout_s):
            raise StorageFailed(f"no answer within {self._timeout_s:g} s ({doing})")
        result, error = ended[0]
        if isinstance(error, StorageFailed):
            raise error
        if error is not None:
            raise StorageFailed(f"{type(error).__name__}: {error} ({doing})") from error
        return result  # type: ignore[return-value]


def _stored(path: str, root: str, about: dict[str, Any]) -> Stored | None:
    """The adapter that a file is; None: another file."""
    inside = unquote(f"/{path.lstrip('/')}").removeprefix(f"/{root.strip('/')}").strip("/")
    folder, _, file = inside.rpartition("/")
    if about.get("type") == "directory":
        return None
    if folder:
        name = folder if file == _FOLDER_FILE else ""
    else:
        name = file.removesuffix(_SUFFIX) if file.endswith(_SUFFIX) else ""
    if NAME.fullmatch(name) is None:
        return None
    nbytes = int(about.get("size") or 0)
    stamp = [str(about[key]) for key in _STAMPS if about.get(key)]
    stamp = stamp or [str(about[key]) for key in _TIMES if about.get(key)]
    said = "\0".join((inside, str(nbytes), *stamp))
    return Stored(name, path, nbytes, hashlib.sha256(said.encode()).hexdigest()[:32])
