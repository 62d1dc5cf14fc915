"""Whether the processes of a worker's models are alive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from maskserve_common.contracts.status_record import RowStatus, WorkerStatus
from maskserve_common.liveness import (
    SERVER_PID,
    Processes,
    Silence,
    sign_in,
    sign_out,
    signed_in_for_s,
    silence_limit_s,
    unwell,
)
from tests.support.eventually import eventually

CHILD = """
import sys
from maskserve_common.liveness import end_with_server, sign_in
end_with_server()
sign_in(sys.argv[1], "denoiser")
print("in", flush=True)
import time
time.sleep(60)
"""


STUCK = """
import ctypes, sys, time
from maskserve_common.liveness import end_when_stuck
end_when_stuck(1.0)
time.sleep(1.5)
print("alive", flush=True)
ctypes.PyDLL(None).pause()  # with Python's lock
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        yield process
        process.kill()


def soon(folder: Path) -> str | None:
    """The fault that `unwell` reports, after a moment for the kernel to act."""
    eventually("it is unwell", lambda: unwell(folder))
    return unwell(folder)


def test_a_model_whose_server_was_gone_before_it_began_ends(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    env = {"PYTHONPATH": os.pathsep.join(sys.path), SERVER_PID: str(process.pid)}
    orphan = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        env=os.environ | env,
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert orphan.returncode == 1


def test_the_living_are_well(tmp_path: Path, child: subprocess.Popen[str]) -> None:
    sign_in(tmp_path, "edit")
    assert unwell(tmp_path) is None
    sign_out(tmp_path, "edit")
    assert unwell(tmp_path) is None


def test_nobody_signed_in_is_well(tmp_path: Path) -> None:
    assert unwell(tmp_path) is None


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "has died"), (signal.SIGSTOP, "is stopped")]
)
def test_the_dead_and_the_stopped_are_not(
    tmp_path: Path, child: subprocess.Popen[str], number: signal.Signals, words: str
) -> None:
    child.send_signal(number)  # and nobody has waited for it: a zombie
    assert soon(tmp_path) == f"the process of its denoiser {words}"


def test_a_process_that_is_gone_is_not(tmp_path: Path, child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    assert soon(tmp_path) == "the process of its denoiser has died"


def test_who_looks_again_and_again_sees_what_changes(
    tmp_path: Path, child: subprocess.Popen[str]
) -> None:
    count = len(os.listdir("/proc/self/fd"))
    processes = Processes(tmp_path)
    assert processes.unwell() is None
    sign_in(tmp_path, "edit")
    assert processes.unwell() is None
    child.send_signal(signal.SIGSTOP)
    eventually("it is stopped", lambda: processes.unwell() is not None)
    child.send_signal(signal.SIGCONT)
    eventually("it runs again", lambda: processes.unwell() is None)
    child.kill()
    died = "the process of its denoiser has died"
    eventually("it has died", lambda: processes.unwell() == died)
    child.wait()
    assert processes.unwell() == died
    sign_out(tmp_path, "edit")
    assert processes.unwell() == died
    (tmp_path / "processes" / f"denoiser.{child.pid}").unlink()
    assert processes.unwell() is None
    assert len(os.listdir("/proc/self/fd")) == count
    (tmp_path / "processes" / f"denoiser.{child.pid}").touch()  # nobody has this number any more
    assert processes.unwell() == died
    processes.close()


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]], stdin=subprocess.PIPE)
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_process_ends_with_its_server(tmp_path: Path) -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        assert server.stdout.readline() == "in\n"
        server.kill()
    child = Path("/proc", str(pid), "stat")
    # Whoever adopts it may leave it a zombie.
    eventually("it has ended", lambda: not child.exists() or _state_of(child) == "Z")


def _state_of(stat: Path) -> str:
    return stat.read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize(
    ("counters", "limit"),
    [
        ({}, 60.0),  # the first step may take long
        ({"steps_total": 10, "step_seconds_total": 0.1}, 2.5),
        ({"steps_total": 10, "step_seconds_total": 40.0}, 40.0),
    ],
)
def test_slow_steps_are_no_silence(counters: dict[str, float], limit: float) -> None:
    status = WorkerStatus("w", "m", "ready", max_rows=8, max_waiting=9, counters=counters)
    assert silence_limit_s(status, 2.5) == limit


def test_a_large_batch_after_small_ones_is_no_silence() -> None:
    """A thousand steps of one small mask, then eight whole images: 0.1 s, then 8 s."""
    counters = {"steps_total": 1000, "step_seconds_total": 100.0, "step_tokens_total": 400_000}
    rows = tuple(RowStatus(str(i), "dense", 4096, 4096, steps_left=9) for i in range(8))
    status = WorkerStatus(
        "w", "m", "ready", max_rows=8, max_waiting=9, counters=counters, running=rows
    )
    assert silence_limit_s(status, 2.5) > 80.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def record(stamp: int) -> WorkerStatus:
    counters = {"steps_total": 10, "step_seconds_total": 0.1}
    return WorkerStatus(
        "w", "m", "ready", max_rows=8, max_waiting=9, counters=counters, monotonic_ns=stamp
    )


def test_a_record_that_stays_the_same_is_silence() -> None:
    clock = Clock()
    silence = Silence(clock)
    faults = []
    for _ in range(30):
        clock.now += 0.1
        faults.append(silence.silence_fault(record(7), 2.5))
    assert faults[:25] == [None] * 25
    assert faults[-1] == "engine has been silent for 2.9 s"
    assert silence.silence_fault(record(8), 2.5) is None


def test_a_machine_that_stood_still_is_no_silence() -> None:
    """The watcher wakes up first: the engine has had no time to write."""
    clock = Clock()
    silence = Silence(clock)
    for pause in (0.1, 60.0, 0.1, 60.0):
        clock.now += pause
        assert silence.silence_fault(record(7), 2.5) is None


def test_a_process_whose_python_stands_still_ends_and_says_where() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STUCK],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ended.returncode == 1
    assert ended.stdout == "alive\n"
    assert 'File "<string>", line 7 in <module>' in ended.stderr


def test_how_long_a_model_has_signed_in(tmp_path: Path) -> None:
    assert signed_in_for_s(tmp_path) == {}
    sign_in(tmp_path, "edit")
    older = tmp_path / "processes" / "preprocess.1"
    for file, age in ((older, 50), (older.with_suffix(".2"), 20)):
        file.touch()
        os.utime(file, (time.time() - age,) * 2)
    ages = signed_in_for_s(tmp_path)
    assert ages.keys() == {"edit", "preprocess"}
    assert ages["edit"] < 5
    assert 19 < ages["preprocess"] < 30  # the newest counts
