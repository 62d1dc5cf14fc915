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
        module: dotted name of the module.
        more: environment variables beside this process's.
    """
    parent_end, child_end = socket.socketpair()
    with child_end:
        process = subprocess.Popen(
            [_python(), "-m", module, str(child_end.fileno())],
            env={**os.environ, **more},
            pass_fds=[child_end.fileno()],
        )
    return process, Connection(parent_end.detach())


def _python() -> str:
    """Path of the interpreter; `sys.executable` may be empty inside Triton's stub."""
    executable = Path(sys.executable or "")
    return (
        str(executable)
        if executable.name.startswith("python")
        else shutil.which("python3") or "python3"
    )
