"""Source images kept so that edits can name them, and whose they are: what clients registered, and
for some time the results that edits asked to keep.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from maskserve_core.config import Config, templates_folder
from maskserve_core.contracts.keys import NO_SCOPE, SCOPE, SHARED, TEMPLATE_ID
from maskserve_core.errors import Overloaded

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


class TemplateFolder:
    """One file per template: the image as it was encoded. Beside it an empty file `<id>.<scope>`
    for each client whose it is, where clients are told apart, and `.result-<id>` where it is a
    result that nobody has registered, whose time of change is that of its last use.

    Several processes may share the folder: files appear whole or not at all and are never
    rewritten in place, and one process at a time adds any.

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
        self._path = Path(path)
        self._max_bytes, self._max_result_bytes = max_bytes, max_result_bytes
        self._result_expires_s = result_expires_s
        self._path.mkdir(parents=True, exist_ok=True)
        self._changing = threading.Lock()

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
                os.utime(self._mark(template_id))
        return encoded

    def shows(self, template_id: str, scope: str) -> bool:
        """Whether a client of `scope` may see the template, if it is there."""
        file = self._file(template_id)
        return scope == NO_SCOPE or any(
            self._owned(file, owner).exists() for owner in (scope, SHARED)
        )

    def owners(self, template_id: str) -> list[str]:
        """Scopes of those whose it is, SHARED among them if it is for every client; sorted."""
        found = self._path.glob(f"{self._file(template_id).name}.*")
        return sorted(file.suffix[1:] for file in found)

    def expires_s(self, template_id: str) -> float | None:
        """Seconds until a result goes if it is not used; None of what was registered."""
        used = self._used(template_id)
        return None if used is None else self._result_expires_s - (time.time() - used)

    def put(self, template_id: str, encoded: bytes, owners: Iterable[str] = ()) -> None:
        """Keep a template for these owners too; an image that is there already stays as it is, and
        expires no more.

        Raises:
            Overloaded: the folder would hold more than its bound.
            OSError: the folder cannot be written.
        """
        target, mark = self._file(template_id), self._mark(template_id)
        with self._alone():
            if not target.exists() or mark.exists():
                self._check_room(len(encoded))
            if not target.exists():
                self._add(target, encoded)
            mark.unlink(missing_ok=True)
            for owner in owners:
                self._owned(target, owner).touch()

    def put_result(self, template_id: str, encoded: bytes, owners: Iterable[str] = ()) -> None:
        """Keep an edit's result for its owners; those that were not used for long make room.

        Raises:
            Overloaded: it alone is more than the bound.
            OSError: the folder cannot be written.
        """
        target, mark = self._file(template_id), self._mark(template_id)
        if len(encoded) > self._max_result_bytes:
            raise Overloaded(
                f"{len(encoded)} bytes exceed [limits] max_result_bytes, {self._max_result_bytes}"
            )
        with self._alone():
            self._drop_results(self._max_result_bytes - len(encoded))
            if not target.exists():
                mark.touch()  # before the file: no result is ever without one
                self._add(target, encoded)
            elif mark.exists():
                os.utime(mark)
            for owner in owners:
                self._owned(target, owner).touch()

    def keep(self, template_id: str) -> None:
        """What is a result is to expire no more.

        Raises:
            Overloaded: as `put`.
        """
        mark = self._mark(template_id)
        with self._alone():
            if mark.exists():
                self._check_room(self._size(template_id))
                mark.unlink()

    def expire(self) -> None:
        """Remove the results whose time is over."""
        with self._alone():
            self._drop_results(self._max_result_bytes)

    def remove(self, template_id: str) -> bool:
        """Forget a template; False when there was none."""
        target = self._file(template_id)
        for owner in self.owners(template_id):
            self._owned(target, owner).unlink(missing_ok=True)
        found = target.exists()
        target.unlink(missing_ok=True)
        self._mark(template_id).unlink(missing_ok=True)
        return found

    def disown(self, template_id: str, scope: str) -> list[str] | None:
        """A client gives its template up; who still has it. None: it was none of that client's."""
        target = self._file(template_id)
        try:
            self._owned(target, scope).unlink()
        except FileNotFoundError:
            return None
        return self.owners(template_id)

    def ids(self) -> list[str]:
        """Ids of all templates, sorted."""
        return sorted(p.name for p in self._path.iterdir() if TEMPLATE_ID.fullmatch(p.name))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else adds files meanwhile."""
        folder = os.open(self._path, os.O_RDONLY)
        try:
            with self._changing:
                # Some network file systems lock no folders; then only this process's threads wait.
                with contextlib.suppress(OSError):
                    fcntl.flock(folder, fcntl.LOCK_EX)
                yield
        finally:
            os.close(folder)

    def _check_room(self, more: int) -> None:
        held = sum(self._size(name) for name in self.ids() if not self._mark(name).exists())
        if held + more > self._max_bytes:
            raise Overloaded(
                f"registered images take {held} bytes, and {more} more exceed "
                f"[limits] max_template_bytes, {self._max_bytes}; evict templates first"
            )

    def _drop_results(self, most: int) -> None:
        """Remove results until they take `most` bytes and none is left whose time is over."""
        marks = [mark.name.removeprefix(_RESULT) for mark in self._path.glob(f"{_RESULT}*")]
        names = [name for name in marks if TEMPLATE_ID.fullmatch(name)]
        held = sum(map(self._size, names))
        for name in sorted(names, key=lambda name: self._used(name) or 0.0):
            left = self.expires_s(name)
            if held <= most and left is not None and left > 0:
                return
            held -= self._size(name)
            self.remove(name)

    def _add(self, target: Path, encoded: bytes) -> None:
        handle, name = tempfile.mkstemp(dir=self._path, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(encoded)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise

    def _used(self, template_id: str) -> float | None:
        """Wall clock of a result's last use; None of what is no result."""
        try:
            return self._mark(template_id).stat().st_mtime
        except FileNotFoundError:
            return None

    def _mark(self, template_id: str) -> Path:
        return self._path / f"{_RESULT}{self._file(template_id).name}"

    def _owned(self, target: Path, owner: str) -> Path:
        if SCOPE.fullmatch(owner) is None:
            raise ValueError(f"{owner!r} is not a scope")
        return target.with_name(f"{target.name}.{owner}")

    def _size(self, template_id: str) -> int:
        try:
            return self._file(template_id).stat().st_size
        except FileNotFoundError:  # removed meanwhile
            return 0

    def _file(self, template_id: str) -> Path:
        if TEMPLATE_ID.fullmatch(template_id) is None:
            raise ValueError(f"{template_id!r} is not a template id")
        return self._path / template_id
