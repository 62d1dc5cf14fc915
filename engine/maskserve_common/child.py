"""Processes of our own Python that another one starts for itself, and a pipe to each."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path


def start_child(module: str, more: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], Connection]:
    """Run a module, whose first argument is the descriptor of its end of the pipe.

    Args:
        module: its dotted name.
        more: environment beside this process's.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [_python(), "-m", module, str(theirs.fileno())],
            env={**os.environ, **more},
            pass_fds=[theirs.fileno()],
        )
    return process, Connection(ours.detach())


def _python() -> str:
    """The interpreter; inside of Triton's stub `sys.executable` may name none."""
    given = Path(sys.executable or "")
    return str(given) if given.name.startswith("python") else shutil.which("python3") or "python3"
