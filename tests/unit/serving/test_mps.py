"""NVIDIA's Multi-Process Service, by a program that keeps the documented protocol."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from maskserve_serving import mps
from maskserve_serving.errors import ServeError
from maskserve_serving.mps import Mps, check_mps
from maskserve_serving.orphans import orphans_of
from tests.support.eventually import eventually

# `-f` runs the daemon; without it, a command on stdin goes to the daemon of the pipe directory.
CONTROL = f"""#!{sys.executable}
import os, pathlib, socket, sys
folder = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
if "CUDA_VISIBLE_DEVICES" in os.environ:
    sys.exit("this would renumber the GPUs of clients")
if sys.argv[1:] == ["-f"]:
    if os.environ.get("MPS_FAILS"):
        sys.exit(1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "control"))
        listener.listen()
        pathlib.Path(os.environ["CUDA_MPS_LOG_DIRECTORY"], "control.log").write_text("started")
        while True:
            client, _ = listener.accept()
            command = client.recv(100).decode().strip()
            client.sendall(b"\\n")
            if command == "quit":
                pathlib.Path(os.environ["CUDA_MPS_LOG_DIRECTORY"], "control.log").write_text("quit")
                (folder / "control").unlink()
                sys.exit(0)
with socket.socket(socket.AF_UNIX) as daemon:
    daemon.connect(str(folder / "control"))
    daemon.sendall(sys.stdin.read().encode())
    daemon.recv(100)
"""


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mps]:
    programs = tmp_path / "bin"
    programs.mkdir()
    program = programs / mps.PROGRAM
    program.write_text(CONTROL, encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    started = Mps(tmp_path / "run", tmp_path / "logs")
    yield started
    started.stop()


def _log(variables: dict[str, str]) -> str:
    return Path(variables["CUDA_MPS_LOG_DIRECTORY"], "control.log").read_text(encoding="utf-8")


def test_it_runs_from_the_first_client_to_the_stop(service: Mps, tmp_path: Path) -> None:
    check_mps()
    variables = service.client_variables()
    assert Path(variables["CUDA_MPS_PIPE_DIRECTORY"]) == tmp_path / "run" / "mps"
    assert Path(variables["CUDA_MPS_PIPE_DIRECTORY"], "control").is_socket()
    assert _log(variables) == "started"
    [daemon] = orphans_of(tmp_path / "run")
    assert service.client_variables() == variables
    assert orphans_of(tmp_path / "run") == [daemon]
    service.stop()
    assert _log(variables) == "quit"
    assert not (tmp_path / "run" / "mps").exists()


def test_one_that_was_killed_is_started_for_the_next_client(service: Mps, tmp_path: Path) -> None:
    service.client_variables()
    [killed] = orphans_of(tmp_path / "run")
    os.kill(killed, signal.SIGKILL)
    eventually("the daemon has ended", lambda: orphans_of(tmp_path / "run") == [], 10)
    variables = service.client_variables()
    [daemon] = orphans_of(tmp_path / "run")
    assert daemon != killed
    assert Path(variables["CUDA_MPS_PIPE_DIRECTORY"], "control").is_socket()


def test_one_that_does_not_start_is_told(
    service: Mps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPS_FAILS", "1")
    with pytest.raises(ServeError, match=rf"^--mps: .* does not start; .* {tmp_path}/logs/mps$"):
        service.client_variables()


def test_a_host_without_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ServeError, match=r"^--mps: no GPU is visible"):
        check_mps()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ServeError, match=r"^--mps: nvidia-cuda-mps-control is missing"):
        check_mps()
