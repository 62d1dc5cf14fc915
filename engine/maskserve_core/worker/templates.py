"""Source images kept so that edits can name them, and whose they are: what clients registered, and
for some time the results that edits asked to keep.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable, Set
from pathlib import Path

from maskserve_core.config import Config, templates_folder
from maskserve_core.contracts.keys import NO_SCOPE, SCOPE, SHARED, TEMPLATE_ID
from maskserve_core.errors import Overloaded
from maskserve_core.files.store import FileStore, make_private, size_of
from maskserve_core.shares import EVERYBODY, Shares, room

_RESULT = ".result-"
UNSCOPED = "unscoped"
"""The owner that stands for those who are not told apart: a worker's own callers, and a router's
without keys."""


def template_folder(config: Config) -> TemplateFolder:
    """That of a worker."""
    limits = config.limits
    return TemplateFolder(
        templates_folder(config),
        limits.max_template_bytes,
        max_result_bytes=limits.max_result_bytes,
        result_expires_s=limits.result_expires_s,
    )


class TemplateFolder:
    """One file per template: the image as it was encoded. Beside it an empty file `<id>.<owner>`
    for each owner, a client's scope or UNSCOPED, and for SHARED, who stands for every client but
    owns nothing; and `.result-<id>` where it is a result that nobody has registered, whose time of
    change is that of its last use. A template goes with its last owner.

    Of registered images, and of results, each owner has a share (`core.shares`).

    Several processes may share the folder (`FileStore`); one at a time adds or removes any.

    Args:
        path: of the folder, which is made.
        max_bytes: of all registered images.
        max_result_bytes: of all kept results.
        result_expires_s: time after its last use when a result goes.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_bytes: int = 2**63,
        *,
        max_result_bytes: int = 2**63,
        result_expires_s: float = math.inf,
    ) -> None:
        self._store = FileStore(path)
        self._max_bytes, self._max_result_bytes = max_bytes, max_result_bytes
        self._result_expires_s = result_expires_s
        make_private(self._store.folder)

    def get(self, template_id: str, scope: str = NO_SCOPE) -> bytes | None:
        """The encoded image; None if there is none, or none that a client of `scope` may see. A
        result is used by that.
        """
        if not self.shows(template_id, scope):
            return None
        left = self.expires_s(template_id)
        if left is not None and left <= 0:
            return None
        try:
            encoded = self._file(template_id).read_bytes()
        except FileNotFoundError:
            return None
        if left is not None:
            with contextlib.suppress(FileNotFoundError):
                os.utime(self._store.folder / _mark(template_id))
        return encoded

    def shows(self, template_id: str, scope: str) -> bool:
        """Whether a client of `scope` may see the template, if it is there."""
        return scope == NO_SCOPE or any(
            self._store.marked(_owned(template_id, owner)) is not None for owner in (scope, SHARED)
        )

    def owners(self, template_id: str) -> list[str]:
        """Scopes of those whose it is, SHARED among them if it is for every client; sorted."""
        return sorted(self._marks(template_id) - {UNSCOPED})

    def expires_s(self, template_id: str) -> float | None:
        """Seconds until a result goes if it is not used; None of what was registered."""
        used = self._used(template_id)
        return None if used is None else self._result_expires_s - (time.time() - used)

    def put(self, template_id: str, encoded: bytes, owners: Iterable[str] = ()) -> None:
        """Keep a template for these owners too; an image that is there already stays as it is, and
        expires no more.

        Raises:
            Overloaded: the folder would hold more than its bound, or more of an owner than its
                share.
            OSError: the folder cannot be written.
        """
        owners = frozenset(owners)
        with self._store.alone():
            there = self._file(template_id).exists()
            if not there or self._used(template_id) is not None:
                self._check_room(len(encoded), owners)
            if not there:
                self._add(template_id, encoded)
            self._own(template_id, owners, there=there)
            self._store.mark(_mark(template_id), there=False)

    def put_result(self, template_id: str, encoded: bytes, owners: Iterable[str] = ()) -> None:
        """Keep an edit's result for its owners; those that were not used for long make room.

        Raises:
            Overloaded: it alone is more than the bound.
            OSError: the folder cannot be written.
        """
        if len(encoded) > self._max_result_bytes:
            raise Overloaded(
                f"{len(encoded)} bytes exceed [limits] max_result_bytes, {self._max_result_bytes}"
            )
        owners = frozenset(owners)
        with self._store.alone():
            there = self._file(template_id).exists()
            if not there:
                self._make_room(len(encoded), min(owners, default=EVERYBODY))
            if not there or self._used(template_id) is not None:
                self._store.mark(_mark(template_id))  # before the file: no result is without one
            if not there:
                self._add(template_id, encoded)
            self._own(template_id, owners, there=there)

    def keep(self, template_id: str) -> None:
        """What is a result is to expire no more.

        Raises:
            Overloaded: as `put`.
        """
        with self._store.alone():
            if self._used(template_id) is not None:
                self._check_room(self._size(template_id), self._marks(template_id))
                self._store.mark(_mark(template_id), there=False)

    def expire(self) -> None:
        """Remove the results whose time is over."""
        with self._store.alone():
            self._make_room(0, EVERYBODY)

    def remove(self, template_id: str) -> bool:
        """Forget a template, whoever owns it; False when there was none."""
        with self._store.alone():
            return self._remove(template_id)

    def disown(self, template_id: str, scope: str) -> bool | None:
        """A client gives its template up; whether that was the last owner, with whom it has gone.
        None: it was none of that client's.
        """
        owned = _owned(template_id, scope)
        with self._store.alone():
            if self._store.marked(owned) is None:
                return None
            self._store.mark(owned, there=False)
            if self._marks(template_id) - {SHARED}:
                return False
            self._remove(template_id)
            return True

    def ids(self) -> list[str]:
        """Ids of all templates, sorted."""
        return sorted(p.name for p in self._store.folder.iterdir() if TEMPLATE_ID.fullmatch(p.name))

    def _own(self, template_id: str, owners: Set[str], *, there: bool) -> None:
        """Write down whose a template is; without a name it is whose that are not told apart."""
        if there and not self._marks(template_id):
            owners = owners | {UNSCOPED}  # it was there before owners were written down
        for owner in owners if owners - {SHARED} else owners | {UNSCOPED}:
            self._store.mark(_owned(template_id, owner))

    def _marks(self, template_id: str) -> set[str]:
        """Its owners, as they are written down."""
        found = self._store.folder.glob(f"{_checked(template_id)}.*")
        return {file.suffix[1:] for file in found}

    def _first_owners(self) -> dict[str, str]:
        """Of each template that is somebody's by name the first of these names."""
        found: dict[str, str] = {}
        for file in self._store.folder.iterdir():
            name, dot, owner = file.name.partition(".")
            if name and dot and owner not in (SHARED, UNSCOPED):
                found[name] = min(owner, found.get(name, owner))
        return found

    def _remove(self, template_id: str) -> bool:
        found = self._file(template_id).exists()
        owned = (_owned(template_id, owner) for owner in self._marks(template_id))
        for name in (*owned, template_id, _mark(template_id)):
            self._store.mark(name, there=False)
        return found

    def _check_room(self, more: int, owners: Set[str]) -> None:
        """Raises Overloaded: so many bytes are too many, in all or of one of these owners."""
        held = {name: self._size(name) for name in self.ids() if self._used(name) is None}
        total = sum(held.values())
        if total + more > self._max_bytes:
            raise Overloaded(
                f"registered images take {total} bytes, and {more} more exceed "
                f"[limits] max_template_bytes, {self._max_bytes}; evict templates first"
            )
        for owner in owners - {SHARED, UNSCOPED}:
            files = self._store.folder.glob(f"*.{owner}")
            own = sum(held.get(file.name.partition(".")[0], 0) for file in files)
            if own and more > room(self._max_bytes, total, own, owner):
                raise Overloaded(
                    f"images registered with this key take {own} bytes, and {more} more exceed its "
                    "share of [limits] max_template_bytes; evict templates first"
                )

    def _make_room(self, more: int, owner: str) -> None:
        """Remove the results whose time is over, and then others until there is room for so many
        bytes of this owner: its own where its share is used up, else those of who has most, and of
        these the ones that were not used for longest.
        """
        marks = [mark.name.removeprefix(_RESULT) for mark in self._store.folder.glob(f"{_RESULT}*")]
        names = [name for name in marks if TEMPLATE_ID.fullmatch(name)]
        used = {name: self._used(name) or 0.0 for name in names}
        owners = self._first_owners()
        shares, of = Shares(self._max_result_bytes), dict[str, list[str]]()
        for name in sorted(names, key=used.__getitem__):
            if time.time() - used[name] >= self._result_expires_s:
                self._remove(name)
                continue
            whose = owners.get(name, EVERYBODY)
            of.setdefault(whose, []).append(name)
            shares.book(whose, self._size(name))
        while more > (shares.room(owner) if of.get(owner) else shares.budget - shares.total):
            whose = owner if more <= shares.budget - shares.total else str(shares.most())
            name = of[whose].pop(0)
            shares.give_back(whose, self._size(name))
            self._remove(name)

    def _add(self, template_id: str, encoded: bytes) -> None:
        with self._store.aside() as new:
            new.file.write(encoded)
            new.keep_as(template_id, durable=True)

    def _used(self, template_id: str) -> float | None:
        """Wall clock of a result's last use; None of what is no result."""
        return self._store.marked(_mark(template_id))

    def _size(self, template_id: str) -> int:
        return size_of(self._file(template_id))

    def _file(self, template_id: str) -> Path:
        return self._store.folder / _checked(template_id)


def _checked(template_id: str) -> str:
    if TEMPLATE_ID.fullmatch(template_id) is None:
        raise ValueError(f"{template_id!r} is not a template id")
    return template_id


def _mark(template_id: str) -> str:
    return f"{_RESULT}{_checked(template_id)}"


def _owned(template_id: str, owner: str) -> str:
    if SCOPE.fullmatch(owner) is None:
        raise ValueError(f"{owner!r} is not a scope")
    return f"{_checked(template_id)}.{owner}"
