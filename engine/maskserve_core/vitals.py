"""Whether the processes of a worker's models are alive.

Triton neither restarts a model's process that died nor says so: requests inside it hang. So each
model writes down its process id, and the fronts and the supervisor look whether it still runs.
The engine says more of itself by its status record; a process here is only alive, stopped or gone.
"""

from __future__ import annotations

import os
from pathlib import Path

from maskserve_core.status_record import WorkerStatus

# States of /proc/PID/stat that cannot serve: stopped, traced, zombie, dead.
_UNWELL = {"T": "is stopped", "t": "is stopped", "Z": "has died", "X": "has died"}

# A step of a large model takes seconds, and its batch may grow from one to the next.
_STEPS_OF_SILENCE = 10
# The first step also loads kernels and allocates; how long steps take is not known yet.
_FIRST_STEP_S = 60.0


def silence_limit_s(status: WorkerStatus, heartbeat_timeout_s: float) -> float:
    """How old a status record may be before its engine counts as hung.

    The engine writes between steps, so a step is a silence. A process that died or was stopped is
    found by `unwell`, and an engine that failed says so: this limit is for what hangs.
    """
    steps = status.counters.get("steps_total", 0)
    if steps < 1:
        return max(heartbeat_timeout_s, _FIRST_STEP_S)
    mean = status.counters.get("step_seconds_total", 0.0) / steps
    return max(heartbeat_timeout_s, _STEPS_OF_SILENCE * mean)


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
