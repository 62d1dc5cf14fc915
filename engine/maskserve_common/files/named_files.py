"""Files by digest and their owners: templates, kept results, and values of workflows."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from maskserve_common.contracts.keys import NO_SCOPE, SHARED, TEMPLATE_ID, entries_id
from maskserve_common.errors import Overloaded
from maskserve_common.files.store import Aside, FileStore, listed, make_private, size_of
from maskserve_common.shares import room

UNSCOPED = "unscoped"
"""Owner of files from clients that are not distinguished: a worker's own callers, and a router's
without keys."""
_OWNER = re.compile(r"[0-9a-z]{1,32}(-[0-9a-z]{1,32})?")
"""Form of an owner: a client's scope, followed by its run where that matters."""


_OWNERS, _SUMS = ".owners", ".sums"


class Sums(msgspec.Struct):
    """Number and bytes of files."""

    count: int = 0
    bytes: int = 0
    of: dict[str, int] = {}
    """Bytes by scope; a file counts for each scope that uses it."""

    def book(self, scopes: Iterable[str], nbytes: int, count: int) -> None:
        """A file comes (1) or goes (-1)."""
        self.count += count
        self.bytes += count * nbytes
        for scope in scopes:
            self.of[scope] = self.of.get(scope, 0) + count * nbytes
            if not self.of[scope]:
                del self.of[scope]


class NamedFiles:
    """One file for each name, a digest. Empty files `.owners/ENTRIES/NAME/OWNER` (`entries_id`)
    record its owners: a client's scope or UNSCOPED, and SHARED, which stands for every client but
    owns nothing. A file is removed with its last owner. Each scope has a share of the room
    (`shares`).

    Nobody lists the folder for a single file: `.sums` has the totals of each scope. A process
    removes it before a change and writes it afterwards. If it is missing, the totals are counted
    again.

    Several processes may share the folder (`FileStore`); one at a time adds or removes files.

    Args:
        path: path of the folder, which is made.
        max_bytes: bytes of all files that count.
        wait_s: seconds to wait for the folder's lock.
    """

    kind, setting, advice = "files", "", ""
    """Words of a refusal: the kind of files, the setting that bounds them, and the advice."""

    def __init__(
        self, path: str | os.PathLike[str], max_bytes: int = 2**63, wait_s: float = math.inf
    ) -> None:
        self._store = FileStore(path)
        self._max_bytes, self._lock_s = max_bytes, wait_s
        make_private(self._store.folder)
        if not (self._store.folder / _OWNERS).is_dir():
            with self._alone():
                self._take_over()

    def shows(self, name: str, scope: str) -> bool:
        """Whether a client of `scope` may see the file, if it is there."""
        return scope == NO_SCOPE or any(
            self._store.marked(_owned(name, owner)) is not None for owner in (scope, SHARED)
        )

    def ids(self) -> list[str]:
        """Names of all files, sorted."""
        return sorted(filter(TEMPLATE_ID.fullmatch, os.listdir(self._store.folder)))

    def sharing(self, name: str) -> list[str]:
        """Names of files that share entries with this one, it itself too if it is there."""
        owners = listed(self._owners_of(name).parent)
        return [path.name for path in owners if self._file(path.name).exists()]

    def remove(self, name: str) -> bool:
        """Remove a file, whoever owns it; return False if there was none."""
        with self._alone():
            return self._remove(name)

    def disown(self, name: str, owner: str) -> bool | None:
        """Remove an owner of a file. Return whether it was the last one, and the file is removed;
        None: it did not own the file.
        """
        with self._alone():
            return self._disown(name, owner)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Take the lock to add or remove files; see `FileStore.alone`."""
        with self._store.alone(self._lock_s):
            yield

    # Alone

    def _disown(self, name: str, owner: str) -> bool | None:
        owned = _owned(name, owner)
        if self._store.marked(owned) is None:
            return None
        with self._booked_anew(name):
            self._store.mark(owned, present=False)
            if self._marks(name) - {SHARED}:
                return False
            self._drop(name)
        return True

    def _add_owners(self, name: str, owners: Iterable[str]) -> None:
        missing = [o for o in owners if self._store.marked(_owned(name, o)) is None]
        if missing:
            with self._booked_anew(name):
                self._mark(name, missing)

    def _keep(self, new: Aside, name: str, owners: Iterable[str], *, durable: bool = False) -> None:
        """Give a new file its name and its owners."""
        with self._booked_anew(name):
            new.keep_as(name, durable=durable)
            self._mark(name, owners)

    def _marks(self, name: str) -> set[str]:
        """Return the recorded owners of a file."""
        return {path.name for path in listed(self._owners_of(name))}

    def _remove(self, name: str) -> bool:
        existed = self._file(name).exists()
        with self._booked_anew(name):
            self._drop(name)
        return existed

    def _mark(self, name: str, owners: Iterable[str]) -> None:
        make_private(self._owners_of(name))
        for owner in owners:
            self._store.mark(_owned(name, owner))

    def _drop(self, name: str) -> None:
        for owner in self._marks(name):
            self._store.mark(_owned(name, owner), present=False)
        with suppress(OSError):  # it has none, or others share its entries
            self._owners_of(name).rmdir()
            self._owners_of(name).parent.rmdir()
        self._store.mark(checked(name), present=False)

    def _booked_on(self, name: str) -> set[str]:
        """Return the scopes that a file's bytes count for."""
        return {scope_of_owner(owner) for owner in self._marks(name)} - {SHARED, UNSCOPED}

    @contextmanager
    def _booked_anew(self, name: str) -> Iterator[None]:
        """Update the sums for a change of a file or its owners; delete them if it fails."""
        sums = self._sums()
        self._book(sums, name, -1)
        self._store.mark(_SUMS, present=False)
        yield
        self._book(sums, name, 1)
        with suppress(OSError):  # a full disk keeps nothing from going
            self._store.write(_SUMS, msgspec.json.encode(sums))

    def _book(self, sums: Sums, name: str, count: int) -> None:
        if self._file(name).exists():
            sums.book(self._booked_on(name), self._size(name), count)

    def _sums(self) -> Sums:
        sums = self._stored_sums()
        if sums is None:
            sums = Sums()
            for name in self.ids():
                self._book(sums, name, 1)
        return sums

    def _stored_sums(self) -> Sums | None:
        """Return the sums as they are recorded; None: there is no valid record now."""
        try:
            return msgspec.json.decode((self._store.folder / _SUMS).read_bytes(), type=Sums)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def _check_room(self, new_bytes: int, scopes: Set[str]) -> None:
        """Raise Overloaded if so many more bytes exceed the total or a scope's share."""
        sums = self._sums()
        if sums.bytes + new_bytes > self._max_bytes:
            raise Overloaded(
                f"{self.kind} take {sums.bytes} bytes, and {new_bytes} more exceed "
                f"{self.setting}, {self._max_bytes}{self.advice}"
            )
        for scope in scopes - {SHARED, UNSCOPED}:
            scope_bytes = sums.of.get(scope, 0)
            if scope_bytes and new_bytes > room(self._max_bytes, sums.bytes, scope_bytes, scope):
                raise Overloaded(
                    f"{self.kind} of this key take {scope_bytes} bytes, and {new_bytes} more "
                    f"exceed its share of {self.setting}{self.advice}"
                )

    def _take_over(self) -> None:
        """Adopt owners that an earlier version wrote as files NAME.OWNER, and its leftovers."""
        for path in listed(self._store.folder):
            name, dot, owner = path.name.partition(".")
            if TEMPLATE_ID.fullmatch(name) and (not dot or _OWNER.fullmatch(owner)):
                self._mark(name, [owner] if dot else [])
                if dot:
                    path.unlink(missing_ok=True)
            elif path.name.startswith((".new-", ".open-")):
                path.unlink(missing_ok=True)
        make_private(self._store.folder / _OWNERS)

    def _size(self, name: str) -> int:
        return size_of(self._file(name))

    def _owners_of(self, name: str) -> Path:
        return self._store.folder / _OWNERS / entries_id(checked(name)) / name

    def _file(self, name: str) -> Path:
        return self._store.folder / checked(name)


def checked(name: str) -> str:
    """Return the name if it is valid. Raises ValueError: it is not a name of such a file."""
    if TEMPLATE_ID.fullmatch(name) is None:
        raise ValueError(f"{name!r} is not a template id")
    return name


def scope_of_owner(owner: str) -> str:
    """Return the scope that an owner belongs to."""
    return owner.partition("-")[0]


def _owned(name: str, owner: str) -> str:
    if _OWNER.fullmatch(owner) is None:
        raise ValueError(f"{owner!r} is not a scope")
    return f"{_OWNERS}/{entries_id(checked(name))}/{name}/{owner}"
