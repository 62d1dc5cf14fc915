"""Source images kept so that edits can name them, and whose they are: what clients registered, and
for some time the results that edits asked to keep.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable, Set

from maskserve_core.config import Config, templates_folder
from maskserve_core.contracts.keys import NO_SCOPE, SHARED, TEMPLATE_ID
from maskserve_core.errors import Overloaded
from maskserve_core.shares import EVERYBODY, Shares
from maskserve_core.worker.named_files import UNSCOPED, NamedFiles, checked

_RESULT = ".result-"


def template_folder(config: Config) -> TemplateFolder:
    """That of a worker."""
    limits = config.limits
    return TemplateFolder(
        templates_folder(config),
        limits.max_template_bytes,
        max_result_bytes=limits.max_result_bytes,
        result_expires_s=limits.result_expires_s,
    )


class TemplateFolder(NamedFiles):
    """One file per template: the image as it was encoded; and `.result-<id>` where it is a result
    that nobody has registered, whose time of change is that of its last use.

    Args:
        path: of the folder, which is made.
        max_bytes: of all registered images.
        max_result_bytes: of all kept results.
        result_expires_s: time after its last use when a result goes.
    """

    what, setting = "registered images", "[limits] max_template_bytes"
    advice = "; evict templates first"

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_bytes: int = 2**63,
        *,
        max_result_bytes: int = 2**63,
        result_expires_s: float = math.inf,
    ) -> None:
        super().__init__(path, max_bytes)
        self._max_result_bytes, self._result_expires_s = max_result_bytes, result_expires_s

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
            self._own_too(template_id, owners, there=there)
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
            self._own_too(template_id, owners, there=there)

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

    def _own_too(self, template_id: str, owners: Set[str], *, there: bool) -> None:
        """Write down whose a template is; without a name it is whose that are not told apart."""
        if there and not self._marks(template_id):
            owners = owners | {UNSCOPED}  # it was there before owners were written down
        self._own(template_id, owners if owners - {SHARED} else owners | {UNSCOPED})

    def _remove(self, name: str) -> bool:
        found = super()._remove(name)
        self._store.mark(_mark(name), there=False)
        return found

    def _counted(self) -> dict[str, int]:
        return {name: self._size(name) for name in self.ids() if self._used(name) is None}

    def _first_owners(self) -> dict[str, str]:
        """Of each template that is somebody's by name the first of these names."""
        found: dict[str, str] = {}
        for file in self._store.folder.iterdir():
            name, dot, owner = file.name.partition(".")
            if name and dot and owner not in (SHARED, UNSCOPED):
                found[name] = min(owner, found.get(name, owner))
        return found

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


def _mark(template_id: str) -> str:
    return f"{_RESULT}{checked(template_id)}"
