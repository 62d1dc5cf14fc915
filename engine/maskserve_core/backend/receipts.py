"""Receipts: a front tells the denoiser which event it has taken, so that the next may be sent.

Triton's stub (2.51) locks up for good when two responses of one call come close upon each other,
both after the first. A thread that waits for responses wakes up holding their lock and waits for
Python's; the stub's thread that brings the second waits for the former lock, holding one of all
calls; and a thread that holds Python's lock and comes back from a new call waits for the latter
(docs/adr/0011-receipts.md). So of a call that has more responses than one, the next is sent only
when the last was taken.

Receipts are lines in a named pipe of the worker's runtime folder: each names a call by its key.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("maskserve")

RECEIPTS = "receipts"
"""Parameter of a request to the pipeline: the key under which receipts for its events come."""

_NAME = "receipts"
_READ_BYTES = 65536
_CLOSE = b"\n"


def give_receipt(runtime_dir: str | os.PathLike[str], key: str) -> None:
    """Say that the newest event of the call has arrived. Waits while the pipe is full."""
    try:
        pipe = os.open(Path(runtime_dir) / _NAME, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENXIO):
            return  # the denoiser is gone
        raise
    try:
        os.set_blocking(pipe, True)
        os.write(pipe, f"{key}\n".encode())  # short lines are written whole
    except BrokenPipeError:
        pass
    finally:
        os.close(pipe)


class ReceiptDesk:
    """The denoiser's end: calls what is kept under a receipt's key, in a thread of its own."""

    def __init__(self, runtime_dir: str | os.PathLike[str]) -> None:
        path = Path(runtime_dir) / _NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # of a denoiser that was killed
        os.mkfifo(path, 0o600)
        # Open for both ways, it has no end when no front has it open.
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._kept: dict[str, Callable[[], None]] = {}
        self._thread = threading.Thread(target=self._run, name="receipts", daemon=True)
        self._thread.start()

    def keep(self, key: str, taken: Callable[[], None]) -> None:
        """Call `taken` at each receipt for `key`, until it is dropped."""
        self._kept[key] = taken

    def drop(self, key: str) -> None:
        self._kept.pop(key, None)

    def close(self) -> None:
        os.write(self._file, _CLOSE)
        self._thread.join()
        os.close(self._file)

    def _run(self) -> None:
        rest = b""
        while True:
            *lines, rest = (rest + os.read(self._file, _READ_BYTES)).split(b"\n")
            for line in lines:
                if not line:
                    return
                self._take(line.decode("ascii", "replace"))

    def _take(self, key: str) -> None:
        taken = self._kept.get(key)
        if taken is None:
            return  # of a call that has ended
        try:
            taken()
        except Exception:
            # One call's trouble is no other call's.
            log.exception("an event could not be sent")
