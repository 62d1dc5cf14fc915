"""A tier in files: one per (template, anchor), shared by all processes that use the folder.

    <folder>/<key>/<anchor>.safetensors     entries
    <folder>/<key>/used                     its time is the template's last use
    <folder>/<key>/pinned                   exists while the template is pinned

One process at a time writes and evicts (`FileStore.alone`). An open file stays readable after its
eviction.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from maskserve_common.contracts.keys import Anchor
from maskserve_common.files.safetensors_header import reader_of
from maskserve_common.files.store import FileStore
from maskserve_engine.cache.entries import AnchorEntry
from maskserve_engine.cache.entry_file import (
    BadEntry,
    EntryFile,
    OpenFile,
    StoredEntry,
    open_entry,
    read_entry,
)
from maskserve_engine.cache.stored_tier import StoredTier, anchor_name, anchor_of
from maskserve_engine.cache.tier import Note, Rebuild, TierEntry, computed_anew

_E = TypeVar("_E", AnchorEntry, StoredEntry)


class FolderTier(StoredTier):
    """Entries in a folder of a tmpfs (tier `host`) or of a disk (tier `disk`).

    Args:
        folder: folder of the files, made if it does not exist.
        budget_bytes: most bytes of all files in the folder, from any process.
        rebuild: returns the seconds to make a template again.
        clock: clock of the file system, in seconds.
        opened: called with each checked file when it is opened.
    """

    def __init__(
        self,
        name: str,
        folder: str | os.PathLike[str],
        budget_bytes: int,
        rebuild: Rebuild = computed_anew,
        clock: Callable[[], float] = time.time,
        opened: Callable[[OpenFile], object] = lambda file: None,
    ) -> None:
        super().__init__(name, str(folder), budget_bytes, rebuild, clock)
        self.folder, self._opened = Path(folder), opened
        self._store = FileStore(folder)

    def put(self, key: str, entry: AnchorEntry | StoredEntry, note: Note) -> bool:
        new = entry if isinstance(entry, StoredEntry) else EntryFile(entry, note)
        try:
            with self._store.alone():
                if not self._make_room(key, entry.anchor, new.nbytes):
                    return False
                with self._store.aside() as aside:
                    new.write(aside.file)
                    aside.keep_as(f"{key}/{anchor_name(entry.anchor)}", durable=True)
                self.touch(key)
        except OSError as error:
            self._refuse(error)
            return False
        self._refused = ""
        self._notes[key] = note
        return True

    def get(self, key: str, anchor: Anchor) -> AnchorEntry | None:
        return self._checked(key, anchor, lambda path: read_entry(bytearray(path.read_bytes())))

    def open(self, key: str, anchor: Anchor) -> StoredEntry | None:
        """Return the checked entry with its tensors still in the file; None as `get`."""
        entry = self._checked(key, anchor, open_entry)
        if entry is not None:
            self._opened(entry.file)
        return entry

    def _checked(
        self, key: str, anchor: Anchor, read: Callable[[Path], tuple[_E, Note]]
    ) -> _E | None:
        path = self._path(key, anchor)
        try:
            entry, self._notes[key] = read(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._refuse(error)
            return None
        except BadEntry as error:
            self._dropped(path, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        return entry if entry.anchor == anchor else None

    def anchors(self, key: str) -> frozenset[Anchor]:
        return frozenset(self._files(self.folder / key))

    def touch(self, key: str) -> None:
        with contextlib.suppress(OSError):
            self._store.mark(f"{key}/used", time_s=self._clock())

    def pin(self, key: str, *, pinned: bool) -> None:
        with contextlib.suppress(OSError):
            self._store.mark(f"{key}/pinned", present=pinned)

    def evict(self, key: str) -> int:
        try:
            with self._store.alone():
                return self._remove(key)
        except OSError as error:
            self._refuse(error)
            return 0

    def entries(self) -> Mapping[str, TierEntry]:
        templates = {}
        try:
            with os.scandir(self.folder) as scan:
                names = [item.name for item in scan if not item.name.startswith(".")]
        except OSError:
            return {}
        for key in names:
            item = self._entry_of(key)
            if item is not None:
                templates[key] = item
        return templates

    def check_integrity(self) -> None:
        with self._store.alone():
            leftovers = self._store.abandoned_files()
        assert not leftovers, f"left behind: {leftovers}"
        assert self.nbytes <= self.budget_bytes, "over budget"

    # Where things lie.

    def _path(self, key: str, anchor: Anchor) -> Path:
        return self.folder / key / anchor_name(anchor)

    def _files(self, folder: Path) -> dict[Anchor, int]:
        sizes = {}
        with contextlib.suppress(OSError), os.scandir(folder) as files:
            for file in files:
                anchor = anchor_of(file.name)
                if anchor is not None:
                    sizes[anchor] = file.stat().st_size
        return sizes

    def _entry_of(self, key: str) -> TierEntry | None:
        files = self._files(self.folder / key)
        if not files:
            return None
        used, pinned = (self._store.marked(f"{key}/{mark}") for mark in ("used", "pinned"))
        return TierEntry(self._note_of(key, files), files, used or 0.0, pinned is not None)

    def _part(self, key: str, anchor: Anchor, begin: int, end: int) -> bytes:
        with self._path(key, anchor).open("rb") as file:
            return reader_of(file)(begin, end)

    def _remove(self, key: str) -> int:
        folder = self.folder / key
        freed = sum(self._files(folder).values())
        self.evictions += bool(freed)
        self._store.drop(key)
        self._notes.pop(key, None)
        return freed
