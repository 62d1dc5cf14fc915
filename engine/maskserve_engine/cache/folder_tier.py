"""A tier in files: one per (template, anchor), shared by all processes that use the folder.

    <folder>/<key>/<anchor>.safetensors     entries
    <folder>/<key>/used                     its time is when the template was last of use
    <folder>/<key>/pinned                   there while the template is pinned
    <folder>/.lock                          held by who writes or evicts
    <folder>/.new-*, .gone-*                on their way in or out; nobody's once the lock is free

A file appears whole or not at all (written aside, synced, renamed). Eviction renames a template
away and unlinks it; who has a file mapped keeps what it maps. Readers take no lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from maskserve_core.contracts.entry_key import Anchor
from maskserve_engine.cache.entries import AnchorEntry
from maskserve_engine.cache.entry_file import BadEntry, EntryFile, read_entry, read_note
from maskserve_engine.cache.tier import Held, Note, Rebuild, chosen_victims, computed_anew

_log = logging.getLogger(__name__)
SUFFIX = ".safetensors"
HEAD = 2**20
"""Bytes in which a file's header lies; one block takes some 300."""


class FolderTier:
    """Entries in a folder of a tmpfs (tier `host`) or of a disk (tier `disk`).

    Args:
        name: of the tier.
        folder: made if it is not there.
        budget_bytes: of all files of the folder, whoever wrote them.
        rebuild: seconds to have a template again.
        clock: of the file system, seconds.
    """

    def __init__(
        self,
        name: str,
        folder: str | os.PathLike[str],
        budget_bytes: int,
        rebuild: Rebuild = computed_anew,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.name, self.folder, self.budget_bytes = name, Path(folder), budget_bytes
        self.evictions = self.corrupt = self.failures = 0
        self._rebuild, self._clock = rebuild, clock
        self._notes: dict[str, Note] = {}
        self._refused = ""
        """What the medium said last; logged when it changes."""

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self.held().values())

    def put(self, key: str, entry: AnchorEntry, note: Note) -> bool:
        new = EntryFile(entry, note)
        try:
            with self._locked():
                self._sweep()
                if not self._make_room(key, entry.anchor, new.nbytes):
                    return False
                self._write(key, entry.anchor, new)
        except OSError as error:
            self._refuse(error)
            return False
        self._refused = ""
        self._notes[key] = note
        return True

    def get(self, key: str, anchor: Anchor) -> AnchorEntry | None:
        path = self._path(key, anchor)
        try:
            with path.open("rb") as file:
                # A private mapping: torch asks for memory it could write, and nobody writes.
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            entry, self._notes[key] = read_entry(mapped)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._refuse(error)
            return None
        except ValueError as error:  # an empty file cannot be mapped; BadEntry
            self.corrupt += 1
            _log.warning("tier %s: %s is dropped: %s", self.name, path, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        return entry if entry.anchor == anchor else None

    def anchors(self, key: str) -> frozenset[Anchor]:
        return frozenset(self._files(self.folder / key))

    def note(self, key: str) -> Note | None:
        return self._notes.get(key)

    def touch(self, key: str) -> None:
        mark, now = self.folder / key / "used", self._clock()
        with contextlib.suppress(OSError):
            mark.touch()
            os.utime(mark, (now, now))

    def pin(self, key: str, *, pinned: bool) -> None:
        mark = self.folder / key / "pinned"
        with contextlib.suppress(OSError):
            if not pinned:
                mark.unlink()
            elif mark.parent.is_dir():
                mark.touch()

    def evict(self, key: str) -> int:
        try:
            with self._locked():
                return self._evict(key)
        except OSError as error:
            self._refuse(error)
            return 0

    def held(self) -> Mapping[str, Held]:
        held = {}
        try:
            with os.scandir(self.folder) as found:
                names = [each.name for each in found if not each.name.startswith(".")]
        except OSError:
            return {}
        for key in names:
            each = self._held(key)
            if each is not None:
                held[key] = each
        return held

    def check_integrity(self) -> None:
        with self._locked():
            self._sweep()
            left = [p.name for p in self.folder.iterdir() if p.name.startswith((".new", ".gone"))]
        assert not left, f"left behind: {left}"
        assert self.nbytes <= self.budget_bytes, "over budget"

    # Where things lie.

    def _path(self, key: str, anchor: Anchor) -> Path:
        return self.folder / key / (anchor_name(anchor) + SUFFIX)

    def _files(self, folder: Path) -> dict[Anchor, int]:
        """Bytes of each entry in a template's folder."""
        found = {}
        with contextlib.suppress(OSError), os.scandir(folder) as files:
            for file in files:
                anchor = anchor_of(file.name)
                if anchor is not None:
                    found[anchor] = file.stat().st_size
        return found

    def _held(self, key: str) -> Held | None:
        folder = self.folder / key
        files = self._files(folder)
        try:
            note = self._notes.get(key) or self._read_note(key, files)
        except (OSError, BadEntry):
            note = Note("", len(files) + 1, 0.0)
        used = 0.0
        with contextlib.suppress(OSError):
            used = (folder / "used").stat().st_mtime
        return Held(note, files, used, (folder / "pinned").exists()) if files else None

    def _read_note(self, key: str, files: Mapping[Anchor, int]) -> Note:
        for anchor in files:
            with self._path(key, anchor).open("rb") as file:
                self._notes[key] = read_note(file.read(HEAD))
            return self._notes[key]
        raise BadEntry("no file")

    # What the lock is held for.

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _sweep(self) -> None:
        """Remove what writers and evicters that were killed have left."""
        for path in self.folder.glob(".new-*"):
            path.unlink(missing_ok=True)
        for path in self.folder.glob(".gone-*"):
            shutil.rmtree(path, ignore_errors=True)

    def _make_room(self, key: str, anchor: Anchor, nbytes: int) -> bool:
        held = self.held()
        replaced = held[key].anchors.get(anchor, 0) if key in held else 0
        used = sum(each.nbytes for each in held.values()) - replaced
        missing = used + nbytes - self.budget_bytes
        chosen = chosen_victims(held, missing, frozenset({key}), self._clock(), self._rebuild)
        for victim in chosen or ():
            self._evict(victim)
        return chosen is not None

    def _write(self, key: str, anchor: Anchor, new: EntryFile) -> None:
        aside, target = self.folder / f".new-{os.getpid()}", self._path(key, anchor)
        try:
            with aside.open("wb") as file:
                new.write(file)
                file.flush()
                os.fsync(file.fileno())
            target.parent.mkdir(exist_ok=True)
            aside.replace(target)
            _sync(target.parent)
        finally:
            aside.unlink(missing_ok=True)
        self.touch(key)

    def _evict(self, key: str) -> int:
        folder = self.folder / key
        freed = sum(self._files(folder).values())
        self.evictions += bool(freed)
        gone = self.folder / f".gone-{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):
            folder.rename(gone)
            shutil.rmtree(gone)
        self._notes.pop(key, None)
        return freed

    def _refuse(self, error: OSError) -> None:
        """Say once what the medium will not do, and count it."""
        self.failures += 1
        said = errno.errorcode.get(error.errno or 0, type(error).__name__)
        if said != self._refused:
            self._refused = said
            _log.warning("tier %s in %s: %s; going on without it", self.name, self.folder, error)


def anchor_name(anchor: Anchor) -> str:
    """A name that gives every bit of the anchor back."""
    return "_".join(x.hex() for x in (anchor.sigma, anchor.timestep, anchor.input_scale))


def anchor_of(name: str) -> Anchor | None:
    stem, dot, _ = name.partition(SUFFIX)
    try:
        return Anchor(*map(float.fromhex, stem.split("_"))) if dot else None
    except (ValueError, TypeError):
        return None


def _sync(folder: Path) -> None:
    """Have a rename in a folder on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
