"""Unix sockets in folders: an address has room for 107 bytes, and a folder's path may be longer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def short_path(folder: Path) -> Iterator[str]:
    """Yield a path to `folder` that is short enough for a socket's address."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
