"""Registered templates: source images kept so that edits can name them, and whose they are."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

from maskserve_core.contracts.keys import TEMPLATE_ID
from maskserve_core.contracts.scopes import NO_SCOPE, SCOPE, SHARED
from maskserve_core.errors import Overloaded


class TemplateFolder:
    """One file per registered template: the image as the client encoded it; beside it an empty file
    `<id>.<scope>` for each client who registered it, where clients are told apart.

    Several processes may share the folder: files appear whole or not at all and are never
    rewritten in place. The bound holds for what one process puts there, from any of its threads.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int = 2**63) -> None:
        self._path = Path(path)
        self._max_bytes = max_bytes
        self._path.mkdir(parents=True, exist_ok=True)
        self._putting = threading.Lock()

    def get(self, template_id: str, scope: str = NO_SCOPE) -> bytes | None:
        """The encoded image; None if there is none, or none that a client of `scope` may see."""
        if not self.shows(template_id, scope):
            return None
        try:
            return self._file(template_id).read_bytes()
        except FileNotFoundError:
            return None

    def shows(self, template_id: str, scope: str) -> bool:
        """Whether a client of `scope` may see the template, if it is there."""
        file = self._file(template_id)
        return scope == NO_SCOPE or any(
            self._owned(file, owner).exists() for owner in (scope, SHARED)
        )

    def owners(self, template_id: str) -> list[str]:
        """Scopes of who registered it, SHARED among them if it is for every client; sorted."""
        found = self._path.glob(f"{self._file(template_id).name}.*")
        return sorted(file.suffix[1:] for file in found)

    def put(self, template_id: str, encoded: bytes, owners: Iterable[str] = ()) -> None:
        """Keep a template for these owners too; an image that is there already stays as it is.

        Raises:
            Overloaded: the folder would hold more than its bound.
            OSError: the folder cannot be written.
        """
        target = self._file(template_id)
        with self._putting:
            if not target.exists():
                self._add(target, encoded)
            for owner in owners:
                self._owned(target, owner).touch()

    def _add(self, target: Path, encoded: bytes) -> None:
        held = sum(self._size(name) for name in self.ids())
        if held + len(encoded) > self._max_bytes:
            raise Overloaded(
                f"registered images take {held} bytes, and {len(encoded)} more exceed "
                f"[limits] max_template_bytes, {self._max_bytes}; evict templates first"
            )
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

    def remove(self, template_id: str) -> bool:
        """Forget a template; False when there was none."""
        target = self._file(template_id)
        for owner in self.owners(template_id):
            self._owned(target, owner).unlink(missing_ok=True)
        try:
            target.unlink()
        except FileNotFoundError:
            return False
        return True

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
