"""The shared memory of a Triton: whose it is, and what of it is left behind.

A server that is killed, or ends by its exit timeout, leaves the Python backend's regions in
/dev/shm. Each worker has a prefix of its own, made from the port that only it can hold, so what
carries the prefix when the worker does not run is nobody's.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def region_prefix(http_port: int) -> str:
    """Prefix of the shared memory regions of the worker at this port."""
    return f"maskserve-{http_port}-"


def close_regions(prefix: str, folder: Path = SHARED_MEMORY) -> None:
    """Close the regions of a worker whose models are loaded to other users of the host.

    TRITON-2.51: the Python backend opens each to everybody's eyes, whatever the umask; what is in
    them are prompts and pictures.
    """
    for region in folder.glob(f"{prefix}*"):
        with suppress(OSError):
            region.chmod(0o600)


def remove_regions(prefix: str, folder: Path = SHARED_MEMORY) -> int:
    """Remove the regions of a worker that does not run; returns how many there were."""
    removed = 0
    for region in folder.glob(f"{prefix}*"):
        try:
            region.unlink()
            removed += 1
        except OSError:
            pass  # gone by itself, or another user's
    return removed
