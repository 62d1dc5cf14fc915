"""Files by digest and whose they are: templates, kept results, and values on their way."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Set
from pathlib import Path

from maskserve_common.contracts.keys import NO_SCOPE, SHARED, TEMPLATE_ID
from maskserve_common.errors import Overloaded
from maskserve_common.files.store import FileStore, make_private, size_of
from maskserve_common.shares import room

UNSCOPED = "unscoped"
"""The owner that stands for those who are not told apart: a worker's own callers, and a router's
without keys."""
_OWNER = re.compile(r"[0-9a-z]{1,32}(-[0-9a-z]{1,32})?")
"""A client's scope, and behind it which of its runs where that matters."""


class NamedFiles:
    """One file for each name, a digest. Beside it an empty file `<name>.<owner>` for each owner, a
    client's scope or UNSCOPED, and for SHARED, who stands for every client but owns nothing. A file
    goes with its last owner. Of the room for them each scope has a share (`core.shares`).

    Several processes may share the folder (`FileStore`); one at a time adds or removes any.

    Args:
        path: of the folder, which is made.
        max_bytes: of all files that count.
    """

    what, setting, advice = "files", "", ""
    """Words of a refusal: what there is too much of, by which setting, and what to do."""

    def __init__(self, path: str | os.PathLike[str], max_bytes: int = 2**63) -> None:
        self._store = FileStore(path)
        self._max_bytes = max_bytes
        make_private(self._store.folder)

    def shows(self, name: str, scope: str) -> bool:
        """Whether a client of `scope` may see the file, if it is there."""
        return scope == NO_SCOPE or any(
            self._store.marked(_owned(name, owner)) is not None for owner in (scope, SHARED)
        )

    def ids(self) -> list[str]:
        """Names of all files, sorted."""
        return sorted(p.name for p in self._store.folder.iterdir() if TEMPLATE_ID.fullmatch(p.name))

    def remove(self, name: str) -> bool:
        """Forget a file, whoever owns it; False when there was none."""
        with self._store.alone():
            return self._remove(name)

    def disown(self, name: str, owner: str) -> bool | None:
        """An owner gives a file up; whether that was the last one, with whom it has gone. None: it
        was none of that owner's.
        """
        with self._store.alone():
            return self._disown(name, owner)

    # Alone

    def _disown(self, name: str, owner: str) -> bool | None:
        owned = _owned(name, owner)
        if self._store.marked(owned) is None:
            return None
        self._store.mark(owned, there=False)
        if self._marks(name) - {SHARED}:
            return False
        self._remove(name)
        return True

    def _own(self, name: str, owners: Iterable[str]) -> None:
        for owner in owners:
            self._store.mark(_owned(name, owner))

    def _marks(self, name: str) -> set[str]:
        """Its owners, as they are written down."""
        return {file.suffix[1:] for file in self._store.folder.glob(f"{checked(name)}.*")}

    def _remove(self, name: str) -> bool:
        found = self._file(name).exists()
        for each in (*(_owned(name, owner) for owner in self._marks(name)), name):
            self._store.mark(each, there=False)
        return found

    def _counted(self) -> dict[str, int]:
        """Bytes of the files that count, by name."""
        return {name: self._size(name) for name in self.ids()}

    def _check_room(self, more: int, scopes: Set[str]) -> None:
        """Raises Overloaded: so many bytes are too many, in all or of one of these scopes."""
        held = self._counted()
        total = sum(held.values())
        if total + more > self._max_bytes:
            raise Overloaded(
                f"{self.what} take {total} bytes, and {more} more exceed "
                f"{self.setting}, {self._max_bytes}{self.advice}"
            )
        for scope in scopes - {SHARED, UNSCOPED}:
            files = self._store.folder.glob(f"*.{scope}*")
            names = {file.stem for file in files if scope_of_owner(file.suffix[1:]) == scope}
            own = sum(held.get(name, 0) for name in names)
            if own and more > room(self._max_bytes, total, own, scope):
                raise Overloaded(
                    f"{self.what} of this key take {own} bytes, and {more} more exceed its "
                    f"share of {self.setting}{self.advice}"
                )

    def _size(self, name: str) -> int:
        return size_of(self._file(name))

    def _file(self, name: str) -> Path:
        return self._store.folder / checked(name)


def checked(name: str) -> str:
    """Raises ValueError: it is not a name of such a file."""
    if TEMPLATE_ID.fullmatch(name) is None:
        raise ValueError(f"{name!r} is not a template id")
    return name


def scope_of_owner(owner: str) -> str:
    """Whose a file is that this owner has."""
    return owner.partition("-")[0]


def _owned(name: str, owner: str) -> str:
    if _OWNER.fullmatch(owner) is None:
        raise ValueError(f"{owner!r} is not a scope")
    return f"{checked(name)}.{owner}"
