"""Stored source images that edits can name, with their owners: images that clients registered and,
for some time, results that edits asked to keep.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Iterable, Set
from pathlib import Path

from maskserve_common.config import Config, templates_folder
from maskserve_common.contracts.keys import NO_SCOPE, SHARED
from maskserve_common.errors import Overloaded
from maskserve_common.files.named_files import UNSCOPED, NamedFiles
from maskserve_common.files.values import Values
from maskserve_common.shares import EVERYBODY, room

_RESULTS = "results"


def templates_of(config: Config, values: Values) -> StoredTemplates:
    """Return a worker's templates; where the host has a folder of values, results lie there, for
    all workers of the host.
    """
    limits = config.limits
    return StoredTemplates(
        templates_folder(config),
        limits.max_template_bytes,
        results=Path(config.values.folder) / _RESULTS if values.host else None,
        max_result_bytes=limits.max_result_bytes,
        result_expires_s=limits.result_expires_s,
    )


class StoredTemplates:
    """Registered images and results. A picture that is both is a result for the result's owners,
    and registered for those who registered it.

    Args:
        path: folder of the registered images, which is made.
        max_bytes: bytes of all registered images.
        results: folder of results, which workers may share; None: in `path`.
        max_result_bytes: bytes of all results.
        result_expires_s: seconds after its last use when a result goes.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_bytes: int = 2**63,
        *,
        results: Path | None = None,
        max_result_bytes: int = 2**63,
        result_expires_s: float = math.inf,
    ) -> None:
        self._registered = RegisteredImages(path, max_bytes)
        results = results or Path(path) / _RESULTS
        self._results = StoredResults(results, max_result_bytes, result_expires_s)
        self._stores = self._registered, self._results

    def get(self, template_id: str, scope: str = NO_SCOPE) -> bytes | None:
        """Return the encoded image; None if there is none, or none that a client of `scope` may
        see. This counts as a use of a result.
        """
        encoded = self._registered.read(template_id, scope)
        return self._results.read(template_id, scope) if encoded is None else encoded

    def ids(self) -> list[str]:
        """Names of all, sorted."""
        return sorted({name for store in self._stores for name in store.ids()})

    def has(self, template_id: str) -> bool:
        return any(store.has(template_id) for store in self._stores)

    def sharing(self, template_id: str) -> bool:
        """Whether there is a template, it itself or another, that has its entries."""
        return any(store.sharing(template_id) for store in self._stores)

    def shows(self, template_id: str, scope: str) -> bool:
        """Whether a client of `scope` may see the template, if it is there."""
        return any(store.shows(template_id, scope) for store in self._stores)

    def owners(self, template_id: str) -> list[str]:
        """Scopes of its owners, SHARED among them if it is for every client; sorted."""
        return sorted({o for store in self._stores for o in store.owners(template_id)} - {UNSCOPED})

    def expires_s(self, template_id: str, scope: str = NO_SCOPE) -> float | None:
        """Return the seconds until an unused result goes; None if a client of `scope` sees it
        registered.
        """
        registered = self._registered.has(template_id)
        if registered and self._registered.shows(template_id, scope):
            return None
        return self._results.expires_s(template_id)

    def put(self, template_id: str, encoded: bytes, owners: Iterable[str] = ()) -> None:
        """Register a template also for these owners; an existing image stays as it is.

        Raises:
            Overloaded: the folder would exceed its bound, or an owner its share.
            OSError: the folder cannot be written.
        """
        self._registered.put(template_id, encoded, owners)

    def put_result(self, template_id: str, encoded: bytes, owners: Iterable[str] = ()) -> None:
        """Keep an edit's result for its owners; the least recently used results make room.

        Raises:
            Overloaded: it alone exceeds the bound.
            OSError: the folder cannot be written.
        """
        self._results.put(template_id, encoded, owners)

    def keep(self, template_id: str) -> None:
        """Register a result as a template for its owners; an expired result is gone.

        Raises:
            Overloaded: there is no room for the image.
        """
        self.expire()
        encoded = self._results.read(template_id, NO_SCOPE)
        if encoded is not None:
            self.put(template_id, encoded, self._results.owners(template_id))

    def expire(self) -> None:
        """Remove expired results."""
        self._results.expire()

    def remove(self, template_id: str) -> bool:
        """Remove a template, whoever owns it; return False if there was none."""
        removed = [store.remove(template_id) for store in self._stores]
        return any(removed)

    def disown(self, template_id: str, owner: str) -> bool | None:
        """Remove an owner of a template. Return whether it was the last one, and the template is
        removed; None: it did not own the template.
        """
        results = [store.disown(template_id, owner) for store in self._stores]
        if results == [None, None]:
            return None
        return not self.has(template_id)


class _Pictures(NamedFiles):
    def has(self, template_id: str) -> bool:
        return self._file(template_id).exists()

    def read(self, template_id: str, scope: str) -> bytes | None:
        """Return the image; None if there is none, or none that a client of `scope` may see."""
        if self.shows(template_id, scope):
            with contextlib.suppress(FileNotFoundError):
                return self._file(template_id).read_bytes()
        return None

    def owners(self, template_id: str) -> set[str]:
        """Return the scopes that own a template."""
        return self._marks(template_id)

    # Alone

    def _add(self, template_id: str, encoded: bytes, owners: Set[str]) -> None:
        """Add an image and its owners. No owner means all clients that are not distinguished, as
        before owners were recorded.
        """
        exists = self.has(template_id)
        nameless = (exists and not self._marks(template_id)) or not owners - {SHARED}
        owners = owners | {UNSCOPED} if nameless else owners
        if exists:
            self._add_owners(template_id, owners)
            return
        with self._store.aside() as new:
            new.file.write(encoded)
            self._keep(new, template_id, owners, durable=True)


class RegisteredImages(_Pictures):
    """Registered images, which stay until they are evicted."""

    kind, setting = "registered images", "[limits] max_template_bytes"
    advice = "; evict templates first"

    def put(self, template_id: str, encoded: bytes, owners: Iterable[str]) -> None:
        """Store a template, as `StoredTemplates.put` does."""
        scopes = frozenset(owners)
        with self._alone():
            if not self.has(template_id):
                self._check_room(len(encoded), scopes)
            self._add(template_id, encoded, scopes)


class StoredResults(_Pictures):
    """Results, which expire some time after their last use (their file's time of change). Several
    workers may share the folder.
    """

    def __init__(self, path: Path, max_bytes: int, expires_s: float) -> None:
        super().__init__(path, max_bytes)
        self._expires_s = expires_s
        self._queues: dict[str, deque[tuple[float, str]]] = {}
        """Scope → times of last use and names, the oldest first, as listed and added since. An
        entry that was used since is skipped."""
        self._listed_at = -math.inf

    def expires_s(self, template_id: str) -> float | None:
        """Seconds until it goes if it is not used; None: it is not there."""
        used = self._store.marked(template_id)
        return None if used is None else self._expires_s - (time.time() - used)

    def read(self, template_id: str, scope: str) -> bytes | None:
        remaining_s = self.expires_s(template_id)
        if remaining_s is None or remaining_s <= 0:
            return None
        encoded = super().read(template_id, scope)
        if encoded is not None:
            self._use(template_id)
        return encoded

    def put(self, template_id: str, encoded: bytes, owners: Iterable[str]) -> None:
        """Store a result, as `StoredTemplates.put_result` does."""
        if len(encoded) > self._max_bytes:
            raise Overloaded(
                f"{len(encoded)} bytes exceed [limits] max_result_bytes, {self._max_bytes}"
            )
        scopes = frozenset(owners)
        with self._alone():
            if self.has(template_id):
                self._use(template_id)
            else:
                self._make_room(len(encoded), min(scopes, default=EVERYBODY))
            self._add(template_id, encoded, scopes)
            self._queue(template_id)

    def expire(self) -> None:
        """Remove expired results."""
        with self._alone():
            self._list()
            self._expire()

    def _use(self, template_id: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._file(template_id))

    # Alone

    def _booked_on(self, name: str) -> set[str]:
        """Return the scope that the bytes count for: the first owner by name, or EVERYBODY."""
        return {min(super()._booked_on(name), default=EVERYBODY)}

    def _make_room(self, new_bytes: int, owner: str) -> None:
        """Evict expired results, then others until the owner has room for `more` bytes: its own if
        its share is used up, else those of the largest owner.
        """
        if time.time() - self._listed_at >= self._expires_s:
            self._list()
        self._expire()
        while True:
            sums = self._sums()
            free, used = self._max_bytes - sums.bytes, sums.of.get(owner, 0)
            if new_bytes <= (room(self._max_bytes, sums.bytes, used, owner) if used else free):
                return
            holder = owner if new_bytes <= free else max(sums.of, key=sums.of.__getitem__)
            self._remove(self._oldest(holder))

    def _oldest(self, scope: str) -> str:
        """Return the owner's least recently used image; there is one."""
        while True:
            queue = self._queues.get(scope, ())
            while queue:
                used, name = queue.popleft()
                if self._store.marked(name) == used and scope in self._booked_on(name):
                    return name
            self._list()

    def _expire(self) -> None:
        """Remove expired results from the queues. Others were used since, or were listed less than
        `expires_s` ago.
        """
        for queue in self._queues.values():
            while queue and time.time() - queue[0][0] >= self._expires_s:
                used, name = queue.popleft()
                if self._store.marked(name) == used:
                    self._remove(name)

    def _list(self) -> None:
        self._queues, self._listed_at = {}, time.time()
        used = {name: self._store.marked(name) or 0.0 for name in self.ids()}
        for name in sorted(used, key=used.__getitem__):
            self._queue(name)

    def _queue(self, name: str) -> None:
        used = self._store.marked(name)
        if used is not None:
            [scope] = self._booked_on(name)
            self._queues.setdefault(scope, deque()).append((used, name))
