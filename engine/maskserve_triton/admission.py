"""Admission of a worker: whether it takes edits, and how many are accepted and not answered.

The fronts are separate processes, and so is the supervisor that stops the worker. They share files
in the worker's runtime folder:

    admission         absent: open; "draining": new edits are refused; "stopped": accepted ones are
                      answered with an error, too
    fronts/<name>     edits in flight in one front, 8 bytes

A front counts an edit before it reads the state, and a drain changes the state before it reads the
counts. So an edit is either refused or waited for.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType

from maskserve_common.files.store import FileStore, make_private

OPEN, DRAINING, STOPPED = "open", "draining", "stopped"
_BYTES = 8


class AdmissionState:
    """Whether a worker takes edits; any process may read and set it."""

    def __init__(self, runtime_dir: str | os.PathLike[str]) -> None:
        self._file = Path(runtime_dir) / "admission"
        self._fronts = Path(runtime_dir) / "fronts"

    def state(self) -> str:
        """`open`, `draining` or `stopped`."""
        if not os.access(self._file, os.F_OK):  # nearly always, and cheaper than an exception
            return OPEN
        try:
            text = self._file.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            return OPEN
        return text if text in (OPEN, STOPPED) else DRAINING

    def drain(self) -> None:
        """Refuse new edits; those accepted go on."""
        self._set(DRAINING)

    def stop(self) -> None:
        """Refuse new edits and end the accepted ones with an error."""
        self._set(STOPPED)

    def in_flight(self) -> int:
        """Edits accepted by the fronts and not answered yet."""
        try:
            counters = list(self._fronts.iterdir())
        except FileNotFoundError:
            return 0
        return sum(int.from_bytes(_read(path), "little") for path in counters)

    def _set(self, state: str) -> None:
        FileStore(self._file.parent).write(self._file.name, state.encode())


class InFlight:
    """The count of one front; the only writer of its file."""

    def __init__(self, runtime_dir: str | os.PathLike[str], front: str) -> None:
        folder = Path(runtime_dir) / "fronts"
        make_private(folder)
        self._file = os.open(folder / front, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._lock = threading.Lock()
        self._count = 0
        self._add(0)

    def __enter__(self) -> InFlight:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def count(self) -> int:
        return self._count

    def enter(self) -> None:
        self._add(1)

    def leave(self) -> None:
        self._add(-1)

    def close(self) -> None:
        os.close(self._file)

    def _add(self, change: int) -> None:
        with self._lock:
            self._count += change
            os.pwrite(self._file, self._count.to_bytes(_BYTES, "little"), 0)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
