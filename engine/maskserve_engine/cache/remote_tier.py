"""The farthest tier: entries under a URL that fsspec understands (s3://, gs://, file://, ...).

It is used on a background thread: a slow or unreachable store delays no edit. The checksum finds an
incomplete upload when it is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

import fsspec

from maskserve_common.contracts.keys import Anchor
from maskserve_common.contracts.tiers import REMOTE
from maskserve_engine.cache.entries import AnchorEntry
from maskserve_engine.cache.entry_file import BadEntry, dump_entry, read_entry
from maskserve_engine.cache.stored_tier import StoredTier, anchor_name, anchor_of
from maskserve_engine.cache.tier import Note, Rebuild, TierEntry, computed_anew


class RemoteTier(StoredTier):
    """Entries as objects under a URL.

    Recency and pins belong to this process: an object store has no clock of uses.

    Args:
        url: URL of the folder; the file system reads its options from the environment.
        rebuild: returns the seconds to make a template again.
        clock: clock, in seconds.
    """

    def __init__(
        self,
        url: str,
        budget_bytes: int,
        rebuild: Rebuild = computed_anew,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(REMOTE.name, url, budget_bytes, rebuild, clock)
        self._files, self._root = fsspec.core.url_to_fs(url)
        self._used: dict[str, float] = {}
        self._pins: set[str] = set()

    def put(self, key: str, entry: AnchorEntry, note: Note) -> bool:
        raw = dump_entry(entry, note)
        try:
            if not self._make_room(key, entry.anchor, len(raw)):
                return False
            self._files.makedirs(f"{self._root}/{key}", exist_ok=True)
            self._files.pipe_file(self._path(key, entry.anchor), raw)
        except Exception as error:  # each file system has its own errors
            self._refuse(error)
            return False
        self._refused = ""
        self._notes[key] = note
        self.touch(key)
        return True

    def get(self, key: str, anchor: Anchor) -> AnchorEntry | None:
        path = self._path(key, anchor)
        try:
            raw = bytearray(self._files.cat_file(path))
        except FileNotFoundError:
            return None
        except Exception as error:
            self._refuse(error)
            return None
        try:
            entry, note = read_entry(raw)
        except BadEntry as error:
            self._dropped(path, error)
            self._delete(path)
            return None
        self._notes[key] = note
        return entry if entry.anchor == anchor else None

    def anchors(self, key: str) -> frozenset[Anchor]:
        return frozenset(self._listed().get(key, {}))

    def touch(self, key: str) -> None:
        self._used[key] = self._clock()

    def pin(self, key: str, *, pinned: bool) -> None:
        (self._pins.add if pinned else self._pins.discard)(key)

    def evict(self, key: str) -> int:
        return self._remove(key)

    def entries(self) -> Mapping[str, TierEntry]:
        return {
            key: TierEntry(
                self._note_of(key, files), files, self._used.get(key, 0.0), key in self._pins
            )
            for key, files in self._listed().items()
        }

    def check_integrity(self) -> None:
        assert self.nbytes <= self.budget_bytes, "over budget"

    def _path(self, key: str, anchor: Anchor) -> str:
        return f"{self._root}/{key}/{anchor_name(anchor)}"

    def _listed(self) -> dict[str, dict[Anchor, int]]:
        try:
            self._files.invalidate_cache()
            objects: dict[str, dict[str, Any]] = self._files.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        except Exception as error:
            self._refuse(error)
            return {}
        listed: dict[str, dict[Anchor, int]] = {}
        for path, about in objects.items():
            _, key, name = f"/{path}".rsplit("/", 2)
            anchor = anchor_of(unquote(name))  # listings over HTTP have links
            if anchor is not None:
                listed.setdefault(key, {})[anchor] = int(about["size"] or 0)
        return listed

    def _part(self, key: str, anchor: Anchor, begin: int, end: int) -> bytes:
        part: bytes = self._files.cat_file(self._path(key, anchor), start=begin, end=end)
        return part

    def _remove(self, key: str) -> int:
        freed = sum(self._listed().get(key, {}).values())
        self._delete(f"{self._root}/{key}")
        self.evictions += bool(freed)
        return freed

    def _delete(self, path: str) -> None:
        try:
            self._files.rm(path, recursive=True)
        except FileNotFoundError:
            pass
        except Exception as error:
            self._refuse(error)
