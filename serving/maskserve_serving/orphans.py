"""Processes that a killed supervisor left: models' processes that are ending or stuck.

They are found by the supervisor's folder in their environment.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

RUN_DIR = "MASKSERVE_RUN_DIR"
"""Environment variable with the folder that the supervisor made for this run."""
# A model's process ends within seconds of its server, also on a busy machine.
_PATIENCE_S = 10.0
_POLL_S = 0.1


def orphans_of(folder: Path) -> list[int]:
    """Return the ids of processes of the supervisor that made `folder`, as far as visible."""
    pids = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another user's
            if process.pid != os.getpid() and process.environ().get(RUN_DIR) == str(folder):
                pids.append(process.pid)
    return pids


def end_orphans(
    folder: Path, report: Callable[[str], None], patience_s: float = _PATIENCE_S
) -> None:
    """Wait until the processes of a dead supervisor have ended; kill them after `patience_s`."""
    pids = orphans_of(folder)
    if pids:
        report(f"waiting for {len(pids)} processes of a killed supervisor to end")
    for pid in _left_after(patience_s, folder):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    _left_after(patience_s, folder)


def _left_after(limit_s: float, folder: Path) -> list[int]:
    end = time.monotonic() + limit_s
    while (pids := orphans_of(folder)) and time.monotonic() < end:
        time.sleep(_POLL_S)
    return pids
