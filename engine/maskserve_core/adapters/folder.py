"""Files of adapters on this host, in a folder with a budget that its processes share.

    NAME@VERSION-SHA256.safetensors   an adapter; its time is when it was last of use
    .new-NAME@VERSION                 on its way in; nobody's once its lock is free
    .lock-NAME@VERSION                held by who brings it in
    .lock                             held by who makes room
    .pin-NAME                         there while the adapter is pinned

A file appears whole or not at all. Eviction unlinks it: who has it open can read it on.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_FILE = re.compile(
    r"(?P<key>(?P<name>[^@]+)@(?P<version>[0-9a-f]{32}))-(?P<digest>[0-9a-f]{64})\.safetensors"
)
_POLL_S = 0.01


class NoRoom(Exception):
    """The budget, or the medium, has no room for the file."""


class AdapterFile(NamedTuple):
    """An adapter on this host. The file stays readable for who has opened it."""

    path: Path
    name: str
    version: str
    digest: str
    """sha256 of the file, in hexadecimal digits."""
    nbytes: int
    used: float
    """When it was last of use, seconds since 1970."""


class AdapterFolder:
    """A tier of adapters: `host` (a tmpfs) or `disk`.

    Args:
        folder: made if it is not there.
        budget_bytes: of all its files, whoever wrote them.
    """

    def __init__(self, folder: str | os.PathLike[str], budget_bytes: int) -> None:
        self.folder = Path(folder)
        self.budget_bytes = budget_bytes

    def find(self, name: str, version: str) -> AdapterFile | None:
        """A file that is there; it counts as used now."""
        for found in self.folder.glob(f"{name}@{version}-*.safetensors"):
            with contextlib.suppress(FileNotFoundError):
                os.utime(found)
                return _described(found)
        return None

    def held(self) -> list[AdapterFile]:
        """All files, the least recently used first."""
        found = (_described(path) for path in self.folder.glob("*@*.safetensors"))
        return sorted((each for each in found if each is not None), key=lambda each: each.used)

    def write(
        self,
        name: str,
        version: str,
        nbytes: int,
        chunks: Iterable[bytes],
        check: Callable[[Path], None] = lambda _: None,
    ) -> AdapterFile:
        """Write a file whole or not at all; only under `locked`.

        Args:
            name: of the adapter.
            version: of its file.
            nbytes: of the file.
            chunks: the file, piece by piece; what they raise is raised on.
            check: looks at the whole file before anybody else sees it, and raises if it is bad.

        Raises:
            NoRoom: there is no room for it.
            ValueError: there were more or fewer bytes.
        """
        aside = self.folder / f".new-{name}@{version}"
        digest, written = hashlib.sha256(), 0
        try:
            self._reserve(aside, nbytes)
            with aside.open("r+b") as out:
                for chunk in chunks:
                    out.write(chunk)
                    digest.update(chunk)
                    written += len(chunk)
                out.flush()
                os.fsync(out.fileno())
            if written != nbytes:
                raise ValueError(f"{written} bytes came of {nbytes}")
            check(aside)
            path = self.folder / f"{name}@{version}-{digest.hexdigest()}.safetensors"
            aside.replace(path)
        except OSError as error:
            raise NoRoom(f"{self.folder}: {error.strerror or error}") from error
        finally:
            aside.unlink(missing_ok=True)
        return AdapterFile(path, name, version, digest.hexdigest(), nbytes, time.time())

    def remove(self, name: str) -> int:
        """Forget all versions of an adapter; returns the bytes that were freed."""
        freed = 0
        for each in self.held():
            if each.name == name:
                each.path.unlink(missing_ok=True)
                freed += each.nbytes
        return freed

    def pin(self, name: str, *, pinned: bool) -> None:
        """Keep an adapter from eviction, in all its versions; or no longer."""
        self.folder.mkdir(parents=True, exist_ok=True)
        mark = self.folder / f".pin-{name}"
        mark.touch() if pinned else mark.unlink(missing_ok=True)

    def pinned(self) -> frozenset[str]:
        """The names that are pinned."""
        return frozenset(path.name.removeprefix(".pin-") for path in self.folder.glob(".pin-*"))

    @contextlib.contextmanager
    def locked(self, name: str, version: str, timeout_s: float) -> Iterator[None]:
        """Be the only one that brings in this file, of all threads and processes.

        Raises:
            TimeoutError: another has been at it for so long.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path, until = self.folder / f".lock-{name}@{version}", time.monotonic() + timeout_s
        while True:
            lock = path.open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _same_file(path, lock.fileno()):
                    break
            except BlockingIOError:
                if time.monotonic() > until:
                    lock.close()
                    raise TimeoutError from None
            lock.close()
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            lock.close()

    def _reserve(self, aside: Path, nbytes: int) -> None:
        """Make the file in its full size, after what is least recently used has gone for it."""
        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._sweep()
            pins, held = self.pinned(), self.held()
            arriving = sum(path.stat().st_size for path in self.folder.glob(".new-*"))
            room = self.budget_bytes - arriving - sum(each.nbytes for each in held)
            for each in held:
                if room >= nbytes:
                    break
                if each.name not in pins:
                    each.path.unlink(missing_ok=True)
                    room += each.nbytes
            if room < nbytes:
                raise NoRoom(
                    f"{self.folder} has no room for {nbytes} bytes: of {self.budget_bytes}, the "
                    "rest is pinned or on its way in"
                )
            with aside.open("wb") as out:
                os.posix_fallocate(out.fileno(), 0, nbytes)

    def _sweep(self) -> None:
        """Remove what a process that died was bringing in."""
        for aside in self.folder.glob(".new-*"):
            key = aside.name.removeprefix(".new-")
            with (self.folder / f".lock-{key}").open("a") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue  # its own process is at it
                aside.unlink(missing_ok=True)
                (self.folder / f".lock-{key}").unlink(missing_ok=True)


def _described(path: Path) -> AdapterFile | None:
    """What a file's name and its clock say; None: it is gone, or no file of ours."""
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


def _same_file(path: Path, opened: int) -> bool:
    """Whether a path still leads to a file that was opened by it."""
    try:
        return os.path.samestat(path.stat(), os.fstat(opened))
    except FileNotFoundError:
        return False
