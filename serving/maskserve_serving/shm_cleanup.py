"""The shared memory of a Triton server: its access rights and its removal.

A server that is killed, or ends by its exit timeout, leaves the Python backend's regions in
/dev/shm. Each worker has its own prefix, made from a port that only it can hold. Regions with the
prefix of a worker that does not run are therefore unused.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def region_prefix(http_port: int) -> str:
    """Return the prefix of the shared memory regions of the worker at this port."""
    return f"maskserve-{http_port}-"


def close_regions(prefix: str, folder: Path = SHARED_MEMORY) -> None:
    """Make the regions of a worker private, after its models are loaded.

    TRITON-2.51: the Python backend makes each region readable for everybody, whatever the umask;
    the regions contain prompts and pictures.
    """
    for region in folder.glob(f"{prefix}*"):
        with suppress(OSError):
            region.chmod(0o600)


def remove_regions(prefix: str, folder: Path = SHARED_MEMORY) -> int:
    """Remove the regions of a worker that does not run, and return their number."""
    removed = 0
    for region in folder.glob(f"{prefix}*"):
        try:
            region.unlink()
            removed += 1
        except OSError:
            pass  # already gone, or another user's
    return removed
