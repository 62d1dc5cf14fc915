"""Questions to the engine, each in a process of its own: the supervisor imports no torch."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import TypeAlias

from maskserve_serving.errors import ServeError

Run: TypeAlias = Callable[[Sequence[str]], subprocess.CompletedProcess[bytes]]
"""Runs a command to its end."""


def run_command(command: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, check=False, capture_output=True)


def ask_engine(module: str, request: bytes, *flags: str, run: Run = run_command) -> str:
    """Return what a module of the engine prints for a request.

    Args:
        module: module that is run with a file and flags.
        request: content of the file.
        flags: flags after the file.
        run: runs the command.

    Raises:
        ServeError: it failed; the text is its sentence or, without one, all that it wrote.
    """
    with tempfile.NamedTemporaryFile(prefix="maskserve-") as file:
        file.write(request)
        file.flush()
        process = run([sys.executable, "-m", module, file.name, *flags])
    if process.returncode:
        raise ServeError(_last_sentence(process.stderr.decode(errors="replace")))
    return process.stdout.decode()


def _last_sentence(stderr: str) -> str:
    """Return the sentence of a process that failed; libraries print much before it."""
    last = next(reversed(stderr.strip().splitlines()), "")
    head = "maskserve serve: "
    return last.removeprefix(head) if last.startswith(head) else stderr
