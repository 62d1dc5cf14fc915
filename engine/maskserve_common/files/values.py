"""Values that pass between the models of a workflow, as files in the host's memory.

A process that makes a value puts it into a folder that the processes of a host share, and passes on
its *reference*, `value:<digest>:<bytes>`; the reader maps the file. A *run* of a workflow opens the
folder for its values. Its end removes all of them, also values that are made later.
"""

from __future__ import annotations

import hashlib
import logging
import math
import mmap
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from maskserve_common.config import ValuesConfig
from maskserve_common.contracts.keys import NO_SCOPE
from maskserve_common.contracts.status_record import ValuesHeld
from maskserve_common.errors import MaskserveError, Overloaded, TemplateNotFound
from maskserve_common.files.named_files import UNSCOPED, NamedFiles, scope_of_owner
from maskserve_common.files.store import listed, make_private

log = logging.getLogger("maskserve")
RUN = "run"
"""Request parameter: the run for which the answer's picture is stored. Without it, the picture is
sent."""
ENCODING = "encoding"
"""Request parameter of a run's edit. MAKE: the edit ends with its encoder, whose outputs the run
keeps. TAKE: its encoder takes them from the run."""
MAKE, TAKE = "make", "take"
PREFIX = b"value:"
_REFERENCE = re.compile(rb"value:([0-9a-f]{64}):([0-9]{1,15})")
_OPEN, _HOST = ".open", ".host"
_CLOSED_S = 1.0
"""Seconds for which the folder is not used after its lock could not be taken."""
_LOCKED = "another process holds its lock"


class Values(NamedFiles):
    """The folder, for any thread. Without a folder there are no references: values pass as bytes.

    Args:
        config: `[values]`.
        wait_s: seconds to wait for the folder's lock; then its holder counts as stopped, and the
            folder is not used for a second.
    """

    kind, setting = "values", "[values] max_bytes"

    def __init__(self, config: ValuesConfig, wait_s: float = math.inf) -> None:
        self._config = config
        self._closed_until = -math.inf
        self._has_warned = False
        self._stored = ValuesHeld()
        self._expires_at = -math.inf
        """Time of time.monotonic() before which nothing expires."""
        self.host = ""
        """Name of the host whose processes share the folder; empty: none."""
        if config.folder:
            try:
                super().__init__(config.folder, config.max_bytes, wait_s)
                self.host = self._named_host()
            except OSError as error:
                self._warn(error)

    def begin(self, scope: str, run: str) -> None:
        """Open the folder for the values of a run, of a client of `scope`."""
        if self.host:
            with suppress(OSError), self._alone():
                self._open(_owner(scope, run))

    def end(self, scope: str, run: str) -> None:
        """Remove all values of the run that no other run has; it gets no more."""
        if self.host:
            with suppress(OSError), self._alone():
                self._end(_owner(scope, run))

    def put(self, parts: Sequence[bytes | memoryview], scope: str, run: str) -> bytes | None:
        """Store these bytes and return a reference; None: they are few, there is no room, or the
        run is over.

        Args:
            parts: parts of the value, in order.
            scope: scope of the run's client.
            run: run that uses the value; empty: none.
        """
        nbytes = sum(len(part) for part in parts)
        if not (self.host and run) or nbytes < self._config.least_bytes:
            return None
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        name = digest.hexdigest()
        if self.put_named(name, parts, scope, run):
            return b"%s%s:%d" % (PREFIX, name.encode(), nbytes)
        return None

    def put_named(
        self, name: str, parts: Sequence[bytes | memoryview], scope: str, run: str
    ) -> bool:
        """Store a value under a SHA-256 that its maker knows beforehand, such as that of the inputs
        it was computed from. Return False if there is no room, or if the run is over.

        Args:
            name: the SHA-256, in hexadecimal digits.
            parts: parts of the value, in order.
            scope: scope of the run's client.
            run: run that uses the value; empty: none.
        """
        if not (self.host and run):
            return False
        try:
            nbytes = sum(len(part) for part in parts)
            return self.share([name], scope, run) or self._add(
                name, parts, nbytes, _owner(scope, run)
            )
        except (OSError, Overloaded) as error:
            self._warn(error)
            return False

    def read_named(self, name: str, scope: str, run: str) -> bytes | None:
        """Return a value of the run that was put under this name; None: it has none."""
        if not (run and self.has(name, scope, run)):
            return None
        with suppress(FileNotFoundError):
            return self._file(name).read_bytes()
        return None

    def share(self, names: Iterable[str], scope: str, run: str) -> bool:
        """Add existing values to this run; return False if the run is over, or if one is missing or
        not the client's.
        """
        if not self.host:
            return False
        owner = _owner(scope, run)
        with suppress(OSError), self._alone():
            self._expire()
            if not self._is_open(owner):
                return False
            for name in names:
                if not (self._file(name).exists() and self.shows(name, scope)):
                    return False
                self._add_owners(name, [owner])
            self._open(owner)  # its time begins again
            return True
        return False

    def has(self, name: str, scope: str, run: str) -> bool:
        """Whether a value is there and the run's."""
        mark = f"{_OPEN}/{_owner(scope, run)}/{name}"
        return (
            bool(self.host) and self._store.marked(mark) is not None and self._file(name).exists()
        )

    def free(self, names: Iterable[str], scope: str, run: str) -> None:
        """Remove values that the run has read for the last time, unless other runs have them."""
        if not self.host:
            return
        with suppress(OSError), self._alone():
            for name in names:
                self._disown(name, _owner(scope, run))

    def shows(self, name: str, scope: str) -> bool:
        owners = self._marks(name)
        return scope == NO_SCOPE or scope in map(scope_of_owner, owners)

    def read(self, element: bytes | memoryview, scope: str) -> bytes | memoryview:
        """Return an element's data: for a reference the file, mapped; else the element itself.

        Raises:
            TemplateNotFound: there is no such value, or none of a client of `scope`.
        """
        reference = parse(element)
        if reference is None or not self.host:
            return element
        name, nbytes = reference
        if self.shows(name, scope):
            with suppress(FileNotFoundError), self._file(name).open("rb") as file:
                mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
                if len(mapped) == nbytes:
                    return mapped
        raise TemplateNotFound(f"value {name[:12]} is not known here")

    def stored(self) -> ValuesHeld:
        """Return the number of values and their bytes. Remove expired values, if no run has done
        so.
        """
        if not self.host:
            return ValuesHeld()
        with suppress(OSError):
            if time.monotonic() >= self._expires_at:
                with self._alone():
                    self._expire()
            sums = self._stored_sums()
            if sums is None:  # another is at it, or was killed
                with self._alone():
                    sums = self._sums()
            self._stored = ValuesHeld(self.host, sums.count, sums.bytes)
        return self._stored

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if time.monotonic() < self._closed_until:
            raise TimeoutError
        with ExitStack() as locked:
            try:
                locked.enter_context(super()._alone())
            except TimeoutError as error:
                self._closed_until = time.monotonic() + _CLOSED_S
                self._warn(error)
                raise
            yield

    def _add(self, name: str, parts: Sequence[bytes | memoryview], nbytes: int, owner: str) -> bool:
        with self._store.aside(nbytes) as new:
            for part in parts:
                new.file.write(part)
            new.file.flush()
            with self._alone():
                if not self._is_open(owner):
                    return False
                if self._file(name).exists():
                    self._add_owners(name, [owner])
                else:
                    self._check_room(nbytes, {scope_of_owner(owner)})
                    self._keep(new, name, [owner])
                return True

    def _mark(self, name: str, owners: Iterable[str]) -> None:
        """Record the names in each run's folder, too."""
        owners = list(owners)
        for owner in owners:
            make_private(self._folder(owner))
            self._store.mark(f"{_OPEN}/{owner}/{name}")
        super()._mark(name, owners)

    def _disown(self, name: str, owner: str) -> bool | None:
        is_removed = super()._disown(name, owner)
        self._store.mark(f"{_OPEN}/{owner}/{name}", present=False)
        return is_removed

    def _folder(self, owner: str) -> Path:
        """Return the folder of a run that has not ended; its modification time is that of its last
        use.
        """
        return self._store.folder / _OPEN / owner

    def _open(self, owner: str) -> None:
        make_private(self._folder(owner))
        os.utime(self._folder(owner))

    def _is_open(self, owner: str) -> bool:
        return self._folder(owner).is_dir()

    def _end(self, owner: str) -> None:
        for path in listed(self._folder(owner)):
            self._disown(path.name, owner)
        with suppress(FileNotFoundError):
            self._folder(owner).rmdir()

    def _expire(self) -> None:
        """End runs of routers that died."""
        now_s = oldest = time.time()
        for path in listed(self._store.folder / _OPEN):
            used = self._store.marked(f"{_OPEN}/{path.name}") or now_s
            if used < now_s - self._config.expires_s:
                self._end(path.name)
            else:
                oldest = min(oldest, used)
        # Marks made or renewed later are younger than all of these.
        self._expires_at = time.monotonic() + self._config.expires_s - (now_s - oldest)

    def _named_host(self) -> str:
        file = self._store.folder / _HOST
        with self._alone():
            if not file.exists():
                self._store.write(_HOST, secrets.token_hex(8).encode())
            return file.read_text()

    def _warn(self, error: MaskserveError | OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            why = error.message if isinstance(error, MaskserveError) else str(error) or _LOCKED
            log.warning(
                "[values] folder: a value could not be written, and travels in a message: %s", why
            )


def parse(element: bytes | memoryview) -> tuple[str, int] | None:
    """Name and bytes of a reference; None: it is none."""
    if len(element) > 96 or (match := _REFERENCE.fullmatch(element)) is None:
        return None
    return match[1].decode(), int(match[2])


def _owner(scope: str, run: str) -> str:
    return f"{scope or UNSCOPED}-{run}"


NO_VALUES = Values(ValuesConfig())
"""A store without a folder: all values pass as bytes."""
