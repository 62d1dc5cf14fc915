"""Files of adapters on this host, in a folder with a budget that its processes share.

    NAME@VERSION-SHA256.safetensors   an adapter; its time is its last use
    .pin-NAME                         exists while the adapter is pinned

Eviction unlinks a file: a process that has opened it can still read it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import NamedTuple

from maskserve_common.files.store import FileStore, chosen_victims, make_private

_FILE = re.compile(
    r"(?P<key>(?P<name>[^@]+)@(?P<version>[0-9a-f]{32}))-(?P<digest>[0-9a-f]{64})\.safetensors"
)


class NoRoom(Exception):
    """The budget, or the medium, has no room for the file."""


class AdapterFile(NamedTuple):
    """An adapter on this host. An open file stays readable after its eviction."""

    path: Path
    name: str
    version: str
    digest: str
    nbytes: int
    used: float
    """Time of the last use, seconds since 1970."""


class AdapterFolder:
    """A tier of adapters: `host` (a tmpfs) or `disk`.

    Args:
        folder: folder of the files, made if it does not exist.
        budget_bytes: bytes of all its files, from any process.
    """

    def __init__(self, folder: str | os.PathLike[str], budget_bytes: int) -> None:
        self.folder, self._store = Path(folder), FileStore(folder)
        self.budget_bytes = budget_bytes

    def find(self, name: str, version: str) -> AdapterFile | None:
        """A file that is there; it counts as used now."""
        for path in self.folder.glob(f"{name}@{version}-*.safetensors"):
            with contextlib.suppress(FileNotFoundError):
                os.utime(path)
                return _described(path)
        return None

    def files(self) -> list[AdapterFile]:
        """All files, the least recently used first."""
        files = (_described(path) for path in self.folder.glob("*@*.safetensors"))
        return sorted((file for file in files if file is not None), key=lambda file: file.used)

    def write(
        self,
        name: str,
        version: str,
        nbytes: int,
        chunks: Iterable[bytes],
        check: Callable[[Path], None] = lambda _: None,
    ) -> AdapterFile:
        """Write a file whole or not at all; one process or thread at a time (`write_lock`).

        Args:
            name: name of the adapter.
            version: version of its file.
            nbytes: bytes of the file.
            chunks: the file, piece by piece; its errors propagate.
            check: reads the whole file before it has its name, and raises if it is bad.

        Raises:
            NoRoom: there is no room for it.
            ValueError: there were more or fewer bytes.
        """
        digest, written = hashlib.sha256(), 0
        try:
            with ExitStack() as stack:
                with self._store.alone():
                    self._make_room(nbytes)
                    new = stack.enter_context(self._store.aside(nbytes))
                for chunk in chunks:
                    new.file.write(chunk)
                    digest.update(chunk)
                    written += len(chunk)
                if written != nbytes:
                    raise ValueError(f"{written} of {nbytes} bytes were received")
                new.file.flush()
                check(new.path)
                name_of = f"{name}@{version}-{digest.hexdigest()}.safetensors"
                path = new.keep_as(name_of, durable=True)
        except OSError as error:
            raise NoRoom(f"{self.folder}: {error.strerror or error}") from error
        return AdapterFile(path, name, version, digest.hexdigest(), nbytes, time.time())

    def remove(self, name: str) -> int:
        """Forget all versions of an adapter; returns the bytes that were freed."""
        freed = 0
        for file in self.files():
            if file.name == name:
                file.path.unlink(missing_ok=True)
                freed += file.nbytes
        return freed

    def pin(self, name: str, *, pinned: bool) -> None:
        """Keep an adapter from eviction, in all its versions; or no longer."""
        make_private(self.folder)
        self._store.mark(f".pin-{name}", present=pinned)

    def pinned(self) -> frozenset[str]:
        """The names that are pinned."""
        marks = self.folder.glob(".pin-*")
        return frozenset(path.name.removeprefix(".pin-") for path in marks)

    def write_lock(self, name: str, version: str, timeout_s: float) -> AbstractContextManager[None]:
        """See `FileStore.write_lock`."""
        return self._store.write_lock(f"{name}@{version}", timeout_s)

    def _make_room(self, nbytes: int) -> None:
        """Evict the least recently used files to make room; only within `alone`."""
        pins, files = self.pinned(), self.files()
        used_bytes = self._store.arriving() + sum(file.nbytes for file in files)
        free = {file: file.nbytes for file in files if file.name not in pins}
        chosen = chosen_victims(
            free, used_bytes + nbytes - self.budget_bytes, lambda file: file.used
        )
        if chosen is None:
            raise NoRoom(
                f"{self.folder} has no room for {nbytes} bytes: the rest of its "
                f"{self.budget_bytes} bytes is pinned or being loaded"
            )
        for file in chosen:
            file.path.unlink(missing_ok=True)


def _described(path: Path) -> AdapterFile | None:
    """Describe a file by its name and modification time; None: it is gone, or has another form of
    name.
    """
    parts = _FILE.fullmatch(path.name)
    if parts is None:
        return None
    try:
        about = path.stat()
    except FileNotFoundError:
        return None
    return AdapterFile(
        path, parts["name"], parts["version"], parts["digest"], about.st_size, about.st_mtime
    )
