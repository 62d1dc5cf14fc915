"""Sockets that lie in folders: their addresses have room for 107 bytes, and folders' paths more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def short_path(folder: Path) -> Iterator[str]:
    """A path of `folder` that a socket's address has room for, whatever the folder's own."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{opened}"
    finally:
        os.close(opened)
