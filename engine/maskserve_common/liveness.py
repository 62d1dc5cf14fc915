"""Whether the processes of a worker's models are alive.

Triton neither restarts a model's process that died nor reports it: requests inside it hang. So each
model writes its process id to a file, and the fronts and the supervisor check whether it still
runs. A process is alive, stopped or gone; the engine's status record says more.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from maskserve_common.contracts.status_record import WorkerStatus

# States of /proc/PID/stat that cannot serve: stopped, traced, zombie, dead.
_UNWELL = {"T": "is stopped", "t": "is stopped", "Z": "has died", "X": "has died"}

SERVER_PID = "MASKSERVE_SERVER_PID"
"""Environment variable: the process id of the Triton that serves the models."""
_PARENT_EVERY_S = 1.0
# Python's lock is handed on within milliseconds; no operation of ours keeps it for seconds.
_STUCK_S = 30.0
_STANDARD_ERROR = 2
# A step's time is predicted roughly: kernels, shapes and memory differ.
_STEPS_OF_SILENCE = 10
# The first step also loads kernels and allocates; how long steps take is not known yet.
_FIRST_STEP_S = 60.0
# The most that one check adds to a silence.
_LONGEST_LOOK_S = 0.5


class Silence:
    """Seconds without a sign of life, as one watcher sees it. Used from one thread.

    Only time in which the watcher itself ran counts: on a machine that stood still, or starves its
    processes, the watched process has not failed. `unwell` finds a process that died or was
    stopped, and a failed engine reports it: this class finds processes that hang.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stamp = -1
        self._looked = clock()
        self._silent_s = 0.0

    def silent_s(self, stamp: int) -> float:
        """Return the seconds since `stamp`, which changes with each sign of life, last changed;
        must be called again and again.
        """
        now_s = self._clock()
        self._silent_s += min(now_s - self._looked, _LONGEST_LOOK_S)
        self._looked = now_s
        if stamp != self._stamp:
            self._stamp, self._silent_s = stamp, 0.0
        return self._silent_s

    def silence_fault(self, status: WorkerStatus, heartbeat_timeout_s: float) -> str | None:
        """Return why an engine counts as hung, in words; None: it does not.

        It writes its record before each step, so a step is a silence.
        """
        silent_s = self.silent_s(status.monotonic_ns)
        if silent_s <= silence_limit_s(status, heartbeat_timeout_s):
            return None
        return f"engine has been silent for {silent_s:.1f} s"


def mean_step_s(status: WorkerStatus) -> float:
    """Mean seconds of a step so far; 0 before the first."""
    steps = status.counters.get("steps_total", 0)
    return status.counters.get("step_seconds_total", 0.0) / steps if steps else 0.0


def silence_limit_s(status: WorkerStatus, heartbeat_timeout_s: float) -> float:
    """Return the seconds that an engine with this record may be silent before it counts as hung.

    A batch of many full rows takes a hundred times as long as one small mask, so the present step
    is measured by its own tokens at the mean rate.
    """
    counters = status.counters
    if counters.get("steps_total", 0) < 1:
        return max(heartbeat_timeout_s, _FIRST_STEP_S)
    seconds = counters.get("step_seconds_total", 0.0)
    per_token = seconds / max(1.0, counters.get("step_tokens_total", 0.0))
    tokens = sum(row.active_tokens for row in status.running)
    return max(
        heartbeat_timeout_s, _STEPS_OF_SILENCE * max(mean_step_s(status), per_token * tokens)
    )


def sign_in(runtime_dir: str | os.PathLike[str], model: str) -> None:
    """Write down that this process serves `model`."""
    folder = Path(runtime_dir) / "processes"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{model}.{os.getpid()}").touch()


def end_with_server() -> None:
    """End this process when its server is gone; call it before slow loads.

    A killed server leaves its models' processes behind, with all their memory. It may be gone
    before this call: its starter has recorded its process id.
    """
    server = int(os.environ.get(SERVER_PID) or os.getppid())
    threading.Thread(target=_end_with, args=(server,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_EVERY_S)
    os._exit(1)


def end_when_stuck(limit_s: float = _STUCK_S) -> None:
    """From now on, end this process when its Python stands still for so long.

    TRITON-2.51: the stub keeps Python's lock while it waits for Triton to enter a metric, for good
    if the server was killed meanwhile. The end comes from a thread that needs no Python, and the
    stacks of those that do go to the log. Call it when all is loaded: an import may take long.
    """
    threading.Thread(target=_end_at, args=(limit_s,), daemon=True).start()


def _end_at(limit_s: float) -> None:
    while True:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=_STANDARD_ERROR)
        time.sleep(limit_s / 10)


def sign_out(runtime_dir: str | os.PathLike[str], model: str) -> None:
    """Take this process off the list, as it ends in an orderly way."""
    (Path(runtime_dir) / "processes" / f"{model}.{os.getpid()}").unlink(missing_ok=True)


def signed_in(runtime_dir: str | os.PathLike[str]) -> list[tuple[str, int]]:
    """Model and process id of every process on the list, also of those that have died."""
    try:
        names = sorted(os.listdir(Path(runtime_dir) / "processes"))
    except FileNotFoundError:
        return []
    pairs = (name.rpartition(".") for name in names)
    return [(model, int(pid)) for model, _, pid in pairs]


def signed_in_for_s(runtime_dir: str | os.PathLike[str]) -> dict[str, float]:
    """Seconds since the newest process of each model on the list signed in."""
    ages: dict[str, float] = {}
    for model, pid in signed_in(runtime_dir):
        try:
            signed = os.stat(Path(runtime_dir) / "processes" / f"{model}.{pid}").st_mtime
        except FileNotFoundError:
            continue  # it has signed out meanwhile
        age = max(0.0, time.time() - signed)
        ages[model] = min(age, ages.get(model, age))
    return ages


class Processes:
    """The processes on a worker's list, looked at again and again; used from one thread at a time.

    Their states' files stay open: to open one costs ten times as much as to read it, which shows
    in the steps that run meanwhile, and a process id that is given to another process by then is
    not taken for the one that had it.
    """

    def __init__(self, runtime_dir: str | os.PathLike[str]) -> None:
        self._runtime_dir = runtime_dir
        self._files: dict[tuple[str, int], int | None] = {}
        """Model and process id -> open /proc/PID/stat; None: there is no such process."""

    def unwell(self) -> str | None:
        """The first process found that cannot serve, in words; None if all can."""
        listed = signed_in(self._runtime_dir)
        if listed != list(self._files):
            self._follow(listed)
        for (model, _), file in self._files.items():
            state = _state(file)
            if state in _UNWELL:
                return f"the process of its {model} {_UNWELL[state]}"
        return None

    def close(self) -> None:
        self._follow([])

    def _follow(self, listed: list[tuple[str, int]]) -> None:
        open_files, self._files = self._files, {}
        for name in listed:
            self._files[name] = open_files.pop(name) if name in open_files else _open_stat(name[1])
        for file in open_files.values():
            if file is not None:
                os.close(file)


def process_unwell(pid: int) -> str | None:
    """Return the bad state of a process, as "is stopped"; None: it runs."""
    file = _open_stat(pid)
    try:
        return _UNWELL.get(_state(file))
    finally:
        if file is not None:
            os.close(file)


def unwell(runtime_dir: str | os.PathLike[str]) -> str | None:
    """`Processes.unwell` for a single check."""
    processes = Processes(runtime_dir)
    try:
        return processes.unwell()
    finally:
        processes.close()


def _open_stat(pid: int) -> int | None:
    try:
        return os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return None


def _state(file: int | None) -> str:
    if file is None:
        return "X"
    try:
        stat = os.pread(file, 1024, 0)
    except ProcessLookupError:
        return "X"
    # "PID (command) STATE …": the command may hold anything, also parentheses.
    return stat.rpartition(b")")[2].split(maxsplit=1)[0].decode()
