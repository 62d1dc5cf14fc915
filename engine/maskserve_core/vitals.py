"""Whether the processes of a worker's models are alive.

Triton neither restarts a model's process that died nor says so: requests inside it hang. So each
model writes down its process id, and the fronts and the supervisor look whether it still runs.
The engine says more of itself by its status record; a process here is only alive, stopped or gone.
"""

from __future__ import annotations

import os
from pathlib import Path

# States of /proc/PID/stat that cannot serve: stopped, traced, zombie, dead.
_UNWELL = {"T": "is stopped", "t": "is stopped", "Z": "has died", "X": "has died"}


def sign_in(runtime_dir: str | os.PathLike[str], model: str) -> None:
    """Write down that this process serves `model`."""
    folder = Path(runtime_dir) / "processes"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{model}.{os.getpid()}").touch()


def sign_out(runtime_dir: str | os.PathLike[str], model: str) -> None:
    """Take this process off the list, as it ends in an orderly way."""
    (Path(runtime_dir) / "processes" / f"{model}.{os.getpid()}").unlink(missing_ok=True)


def unwell(runtime_dir: str | os.PathLike[str]) -> str | None:
    """The first process found that cannot serve, in words; None if all can."""
    try:
        names = sorted(os.listdir(Path(runtime_dir) / "processes"))
    except FileNotFoundError:
        return None
    for name in names:
        model, _, pid = name.rpartition(".")
        state = _state(pid)
        if state in _UNWELL:
            return f"the process of its {model} {_UNWELL[state]}"
    return None


def _state(pid: str) -> str:
    try:
        stat = Path("/proc", pid, "stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    # "PID (command) STATE …": the command may hold anything, also parentheses.
    return stat.rpartition(")")[2].split()[0]
