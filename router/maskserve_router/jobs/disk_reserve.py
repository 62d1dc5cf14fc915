"""A file that holds room on the disk of the jobs: deletion needs some, too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_BYTES: Final = 8 * 2**20


class DiskReserve:
    """Room for the changes that free room; without a file there is none.

    Args:
        file: the file; None: there is no reserve.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def fill(self) -> None:
        """Allocate the file if it is missing and the disk has room."""
        if self._file is None or self._file.exists():
            return
        try:
            with os.fdopen(os.open(self._file, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
                os.posix_fallocate(file.fileno(), 0, _BYTES)
        except OSError:
            self._file.unlink(missing_ok=True)

    def remove(self) -> bool:
        """Remove the file. Return False: there is none."""
        if self._file is None or not self._file.exists():
            return False
        self._file.unlink(missing_ok=True)
        return True
