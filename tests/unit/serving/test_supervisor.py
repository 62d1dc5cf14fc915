"""The supervisor and what it cannot foresee: deaf servers, full disks, its own end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_serving import heartbeat, orphans
from maskserve_serving.errors import ServeError
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor
from tests.fakes.fake_triton import fake_triton
from tests.support.eventually import eventually

MODEL = str(CHECKOUT / "assets" / "models" / "demo")
Start = Callable[..., Supervisor]


@pytest.fixture
def report_lines() -> list[str]:
    return []


@pytest.fixture
def start(tmp_path: Path, report_lines: list[str]) -> Iterator[Start]:
    config = tmp_path / "maskserve.toml"
    running: list[Supervisor] = []

    def start(tables: str = "") -> Supervisor:
        config.write_text(tables)
        options = ServeOptions(
            model=MODEL,
            base_port=free_base_port(),
            config=config,
            log_dir=tmp_path / "logs",
            tritonserver=fake_triton(tmp_path),
            report=report_lines.append,
        )
        running.append(Supervisor(options, backoff_s=(0.1,)))
        running[-1].start()
        return running[-1]

    yield start
    for supervisor in running:
        supervisor.kill()


def restarted(supervisor: Supervisor, times: int = 1) -> None:
    """Wait until the worker has been restarted so often and is ready."""
    [worker] = supervisor.workers
    eventually("it is restarted", lambda: worker.restarts >= times, timeout_s=60)
    eventually("it is ready", lambda: heartbeat.is_ready(worker.http_url), timeout_s=60)


def kill_server(supervisor: Supervisor) -> None:
    pid = supervisor.workers[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def test_a_stopped_server_is_restarted(start: Start, report_lines: list[str]) -> None:
    supervisor = start()
    pid = supervisor.workers[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    restarted(supervisor)
    assert any("failed: tritonserver is stopped" in line for line in report_lines)


def test_a_deaf_server_is_restarted(start: Start, report_lines: list[str], tmp_path: Path) -> None:
    supervisor = start("[engine]\nheartbeat_timeout_s = 2.0\n")
    deaf = tmp_path / "deaf"
    deaf.touch()
    eventually("it is noticed", lambda: supervisor.workers[0].restarts, timeout_s=60)
    deaf.unlink()
    restarted(supervisor)
    silences = [
        re.search(r"failed: tritonserver has not answered for ([\d.]+) s", x) for x in report_lines
    ]
    assert min(float(silence[1]) for silence in silences if silence) >= 2.0


def test_a_full_log_disk_does_not_prevent_a_restart(
    start: Start, report_lines: list[str], tmp_path: Path
) -> None:
    supervisor = start()
    logs = tmp_path / "logs"
    assert "fake Triton at" in (logs / "worker-0.log").read_text()
    for log in logs.iterdir():
        log.unlink()
        log.symlink_to("/dev/full")
    kill_server(supervisor)
    restarted(supervisor)
    assert [line for line in report_lines if "cannot write" in line] == [
        f"worker-0: cannot write {logs}/worker-0.log: No space left on device; lines are lost"
    ]


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_a_log_folder_that_is_lost_does_not_prevent_a_restart(
    start: Start, tmp_path: Path, log_format: str
) -> None:
    supervisor = start(f'[log]\nformat = "{log_format}"\n')
    (tmp_path / "logs").rename(tmp_path / "away")
    (tmp_path / "logs").touch()
    kill_server(supervisor)
    restarted(supervisor)


def test_a_log_folder_that_cannot_be_written_is_told_at_the_start(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(ServeError, match=r"--log-dir: cannot write .*worker-0\.log: "):
        start()


def test_a_model_that_does_not_load_is_told_while_others_still_load(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "deaf").touch()  # it is not ready
    (tmp_path / "says").write_text(
        "E1120 20:20:38.0 9597 model_lifecycle.cc:642] \"failed to load 'denoiser' version 1: "
        'Internal: ConfigError: it is broken\\n\\nAt:\\n  /w/model.py(19): initialize\\n"\n'
    )
    error_pattern = (
        r"model denoiser failed to load: ConfigError: it is broken; the log is .*worker-0\.log"
    )
    with pytest.raises(ServeError, match=error_pattern):
        start()


def test_a_surprise_does_not_end_the_watch(
    start: Start, report_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = start()
    [worker] = supervisor.workers
    surprised = threading.Event()

    def surprise() -> None:
        surprised.set()
        raise ValueError("boom")

    with monkeypatch.context() as patched:
        patched.setattr(worker, "health_problem", surprise)
        assert surprised.wait(10)
        time.sleep(0.5)
    assert sum("ValueError: boom" in line for line in report_lines) == 1
    kill_server(supervisor)
    restarted(supervisor)
    assert supervisor.stop()


def test_a_refused_process_is_tried_again(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = start()
    popen, refusals = subprocess.Popen, [1, 2]

    def refuse(*args: object, **options: object) -> object:
        if refusals:
            refusals.pop()
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return popen(*args, **options)  # type: ignore[call-overload]

    monkeypatch.setattr("maskserve_serving.process.subprocess.Popen", refuse)
    kill_server(supervisor)
    restarted(supervisor, 3)


def test_what_speaks_no_http_is_not_ready() -> None:
    """Such as the gRPC port of another worker."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert not heartbeat.is_ready(f"http://127.0.0.1:{server.getsockname()[1]}")
        thread.join()


def test_a_killed_supervisor_can_be_started_again_at_once(tmp_path: Path) -> None:
    """The processes of its models take a moment to end."""
    base = free_base_port()
    program = fake_triton(tmp_path, lingers_s=8.0)
    command = [sys.executable, "-m", "maskserve_client.cli", "serve", "--model", MODEL]
    command += ["--base-port", str(base), "--tritonserver", str(program)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

    def serve() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("ready"):
                break
        assert process.poll() is None
        outputs.append("".join(lines))
        return process

    outputs: list[str] = []
    first = serve()
    first.kill()
    first.communicate()
    second = serve()  # begins to look within seconds, also on a busy machine
    try:
        assert re.search(r"waiting for \d+ processes of a killed supervisor to end", outputs[1])
    finally:
        second.send_signal(signal.SIGTERM)
        second.communicate(timeout=120)
    assert second.returncode == 0


def test_an_orphan_that_stays_is_killed(tmp_path: Path) -> None:
    stay = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    command = [sys.executable, "-c", stay]
    orphan = subprocess.Popen(command, env=os.environ | {orphans.RUN_DIR: str(tmp_path)})
    other_process = subprocess.Popen(command, env=os.environ | {orphans.RUN_DIR: f"{tmp_path}2"})
    try:
        eventually("it is found", lambda: orphans.orphans_of(tmp_path) == [orphan.pid])
        orphans.end_orphans(tmp_path, print, patience_s=0.2)
        assert orphan.wait(10) == -signal.SIGKILL
        assert other_process.poll() is None
    finally:
        for process in (orphan, other_process):
            process.kill()
            process.wait()
