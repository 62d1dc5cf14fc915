"""Files in a folder that threads and processes share.

    NAME          a file, or a folder of files: whole or not at all, never rewritten in place
    .new/*        a file that is being written, locked by its writer; stale once the lock is free
    .gone/*       a folder that is being removed; stale once the folder's lock is free
    .lock         held by the process that makes room
    .lock-NAME    held by the process that writes NAME

Readers take no lock: an open file stays readable after it was replaced or removed. Only the user
who made them can read files (0600) and folders (0700). Unfinished files lie in folders of their
own, so that a search for them does not list all files.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, TypeVar

_K = TypeVar("_K")
_PRIVATE_FILE, _PRIVATE_FOLDER = 0o600, 0o700
_NEW, _REMOVED, _LOCK = ".new", ".gone", ".lock"
_POLL_S = 0.01


class Aside:
    """A file that has no name in the folder yet."""

    def __init__(self, store: FileStore, path: Path, file: BinaryIO) -> None:
        self._store, self.path, self.file = store, path, file

    def keep_as(self, name: str, *, durable: bool = False) -> Path:
        """Move the file to this name, replacing any other; return its path.

        Args:
            name: name in the folder, or in a subfolder, which is made.
            durable: whether to flush it and its name to the disk.

        Raises:
            OSError: the medium failed.
        """
        self.file.flush()
        target = self._store.folder / name
        if durable:
            os.fsync(self.file.fileno())
        make_private(target.parent)
        self.path.replace(target)
        if durable:
            _sync(target.parent)
        return target


class FileStore:
    """A folder of such files. Its methods raise the OSError of the medium.

    Args:
        folder: folder of the files, made with the first one.
        is_shared: whether the folder also has other files, such as a user's: new files then lie
            beside them, hidden, and leave no folder behind.
    """

    def __init__(self, folder: str | os.PathLike[str], *, is_shared: bool = False) -> None:
        self.folder = Path(folder)
        self._is_shared = is_shared
        self._changing = threading.Lock()

    def write(self, name: str, data: bytes, *, mode: int = _PRIVATE_FILE) -> None:
        """Put a file of these bytes in the place of NAME."""
        with self.aside(mode=mode) as new:
            new.file.write(data)
            new.keep_as(name)

    @contextlib.contextmanager
    def aside(self, nbytes: int = 0, *, mode: int = _PRIVATE_FILE) -> Iterator[Aside]:
        """Yield a file to write and keep under a name; otherwise it is removed.

        Args:
            nbytes: bytes to allocate at once, so that no write fails for want of space.
            mode: mode of the file, less the process's umask.
        """
        token = secrets.token_hex(8)
        path = self.folder / (f"{_NEW}-{token}" if self._is_shared else f"{_NEW}/{token}")
        make_private(path.parent)
        with _locked_file(path, mode) as file:
            try:
                if nbytes:
                    os.posix_fallocate(file.fileno(), 0, nbytes)
                yield Aside(self, path, file)
            finally:
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def alone(self, timeout_s: float = math.inf) -> Iterator[None]:
        """Be the only one that makes room or writes files in this way; remove what killed processes
        left.

        Raises:
            TimeoutError: another one took longer than `timeout_s`.
        """
        make_private(self.folder)
        if not self._changing.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            raise TimeoutError
        try:
            with _locked_file(self.folder / _LOCK, timeout_s=timeout_s):
                self._sweep()
                yield
        finally:
            self._changing.release()

    @contextlib.contextmanager
    def write_lock(self, name: str, timeout_s: float) -> Iterator[None]:
        """Be the only one that writes NAME.

        Raises:
            TimeoutError: another one took longer than `timeout_s`.
        """
        make_private(self.folder)
        path = self.folder / f"{_LOCK}-{name}"
        with _locked_file(path, timeout_s=timeout_s):
            try:
                yield
            finally:
                path.unlink(missing_ok=True)

    def arriving(self) -> int:
        """Return the bytes of unfinished files."""
        return sum(map(size_of, listed(self.folder / _NEW)))

    def drop(self, name: str) -> None:
        """Remove a folder of files, at once for all readers; only within `alone`."""
        trash_path = self.folder / _REMOVED / str(os.getpid())
        make_private(trash_path.parent)
        with contextlib.suppress(FileNotFoundError):
            (self.folder / name).rename(trash_path)
            shutil.rmtree(trash_path)

    def mark(self, name: str, *, present: bool = True, time_s: float | None = None) -> None:
        """Make or remove an empty file whose presence or time is a mark.

        Args:
            name: name of the file.
            present: whether it exists afterwards.
            time_s: seconds since 1970; None: now.
        """
        path = self.folder / name
        if present:
            path.touch(_PRIVATE_FILE)
            os.utime(path, None if time_s is None else (time_s, time_s))
        else:
            path.unlink(missing_ok=True)

    def marked(self, name: str) -> float | None:
        """The time of a mark, seconds since 1970; None: it is not there."""
        try:
            return (self.folder / name).stat().st_mtime
        except OSError:
            return None

    def abandoned_files(self) -> list[str]:
        """Return the names of unfinished files and folders."""
        return [
            path.name
            for folder_name in (_NEW, _REMOVED)
            for path in listed(self.folder / folder_name)
        ]

    def _sweep(self) -> None:
        for path in listed(self.folder / _NEW):
            with contextlib.suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # else its writer is at it
                path.unlink(missing_ok=True)
        for path in listed(self.folder / _REMOVED):
            shutil.rmtree(path, ignore_errors=True)


def chosen_victims(
    sizes: Mapping[_K, int], missing: int, order: Callable[[_K], float]
) -> list[_K] | None:
    """Choose what to evict until `missing` bytes are free; None: all of it is too little.

    Args:
        sizes: bytes of each candidate.
        missing: bytes over the budget.
        order: the smallest goes first.
    """
    chosen: list[_K] = []
    for key in sorted(sizes, key=order):
        if missing <= 0:
            break
        chosen.append(key)
        missing -= sizes[key]
    return chosen if missing <= 0 else None


def make_private(folder: Path) -> None:
    """Make a folder with its parents for its own user only, unless it exists."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(_PRIVATE_FOLDER, exist_ok=True)


def listed(folder: Path) -> list[Path]:
    """Return the paths in a folder; none where there is no folder."""
    try:
        return [folder / name for name in os.listdir(folder)]
    except FileNotFoundError:
        return []


def size_of(path: Path) -> int:
    """Bytes of a file; 0: it is gone."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


@contextlib.contextmanager
def _locked_file(
    path: Path, mode: int = _PRIVATE_FILE, timeout_s: float = math.inf
) -> Iterator[BinaryIO]:
    """Open a file and lock it; create it if it is absent.

    Raises:
        TimeoutError: another process kept the lock for longer than `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode), "r+b")
        with file:
            if _lock(file, deadline_s) and _same_file(path, file):
                yield file
                return


def _lock(file: BinaryIO, until: float) -> bool:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if until == math.inf else fcntl.LOCK_NB))
        except BlockingIOError:
            if time.monotonic() > until:
                raise TimeoutError from None
            time.sleep(_POLL_S)
            continue
        except OSError:
            return True  # some network file systems lock nothing
        return True


def _same_file(path: Path, handle: BinaryIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle.fileno()))
    except FileNotFoundError:
        return False


def _sync(folder: Path) -> None:
    """Flush a rename in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
