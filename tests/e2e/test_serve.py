"""`maskserve serve` as a person runs it: what it refuses, what it survives, how it stops."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from maskserve_serving.ports import Ports, check_free, free_base_port
from maskserve_serving.shm_cleanup import SHARED_MEMORY, region_prefix
from tests.support.calls import Grpc, InferenceServerException, Pending, pixels, plain_edit
from tests.support.eventually import eventually
from tests.support.faults.supervisor_faults import running_files

SERVE = [sys.executable, "-m", "maskserve_client.cli", "serve"]
# Loading takes seven seconds on a free machine, and a minute on a busy one.
LOAD_S = 180.0


class Serving:
    """A running `maskserve serve`."""

    def __init__(self, base_port: int, *arguments: str) -> None:
        self.base_port = base_port
        self.ports = Ports.of_worker(base_port, 0)
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [*SERVE, "--base-port", str(base_port), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def until(self, text: str, timeout_s: float = LOAD_S) -> str:
        """Read its output up to a line that has `text`."""
        end = time.monotonic() + timeout_s
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if text in line:
                return line
            assert time.monotonic() < end, "\n".join(self.lines)
        raise AssertionError(f"it ended without {text!r}:\n" + "\n".join(self.lines))

    def wait(self, timeout_s: float = 60.0) -> int:
        """Its exit code, with the rest of its output in `lines`."""
        output, _ = self.process.communicate(timeout=timeout_s)
        self.lines += output.splitlines()
        return self.process.returncode

    def files_are_private(self) -> None:
        """Other users of the host can read none of its files in memory and on disk."""
        worker = running_files(self.base_port)[0]
        prefix = region_prefix(self.ports.http)
        regions = [path for path in SHARED_MEMORY.iterdir() if path.name.startswith(prefix)]
        paths = [*worker.root.parent.rglob("*"), *worker.templates.parent.rglob("*"), *regions]
        assert len(paths) > 5
        assert regions
        real_paths = [path for path in paths if not path.is_symlink()]
        open_to_others = [str(path) for path in real_paths if path.stat().st_mode & 0o077]
        assert open_to_others == []

    def child(self, model: str) -> psutil.Process:
        """The process that serves a model."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            if f"model_repository/{model}/1" in " ".join(process.cmdline()):
                return process
        raise AssertionError(f"no process serves {model}")

    def nothing_left(self) -> None:
        """No process, port, shared memory or file."""
        check_free("127.0.0.1", self.ports)
        assert list(SHARED_MEMORY.glob(region_prefix(self.ports.http) + "*")) == []
        http_port = str(self.ports.http)
        for process in psutil.process_iter(["name", "cmdline"]):
            if process.info["name"] == "tritonserver":
                cmdline = process.info["cmdline"] or []
                # Another test's server may have these digits in a path.
                assert not any(http_port == part.rpartition("=")[2] for part in cmdline)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGTERM)
            self.process.communicate(timeout=30)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serving]]:
    running: list[Serving] = []

    def start(*arguments: str, base_port: int | None = None) -> Serving:
        port = base_port or free_base_port()
        running.append(Serving(port, "--log-dir", str(tmp_path / "logs"), *arguments))
        return running[-1]

    yield start
    for serving in running:
        serving.close()


def refused(serving: Serving) -> str:
    """The one sentence of a `maskserve serve` that did not start."""
    assert serving.wait(LOAD_S) == 1
    serving.nothing_left()
    text = "\n".join(serving.lines)
    assert "Traceback" not in text
    sentence = serving.lines[-1]
    assert sentence.startswith("maskserve serve: ")
    return sentence


def test_a_missing_model(serve: Callable[..., Serving]) -> None:
    serving = serve("--model", "/no/such/folder")
    assert refused(serving) == "maskserve serve: --model: there is no folder /no/such/folder"


def test_a_taken_port(serve: Callable[..., Serving], model: Path) -> None:
    port = free_base_port()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port + 1))
        listener.listen()
        serving = serve("--model", str(model), base_port=port)
        assert serving.wait() == 1
    assert serving.lines == [
        f"maskserve serve: port {port + 1} (gRPC) on 127.0.0.1 cannot be used: "
        "address already in use; stop what uses it or choose another --base-port"
    ]


def test_a_bad_configuration(serve: Callable[..., Serving], model: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[engine]\nmax_rowz = 3\n")
    serving = serve("--model", str(model), "--config", str(config))
    assert refused(serving).startswith(
        "maskserve serve: [engine] max_rowz: is not a known key (did you mean max_rows?); "
    )


# tests/unit/engine/stages/test_loader.py holds what the model says, and what the
# supervisor makes of its log tests/unit/serving/test_serving.py.
@pytest.mark.slow
def test_a_model_that_does_not_load(
    serve: Callable[..., Serving], model: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    [weights] = (broken / "transformer").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:100])
    sentence = refused(serve("--model", str(broken)))
    assert "model denoiser failed to load: " in sentence
    assert "cannot load" in sentence
    assert str(broken / "transformer") in sentence
    assert "logs/worker-0.log" in sentence


def test_denoiser_and_router_come_back_and_it_drains(
    serve: Callable[..., Serving], model: Path
) -> None:
    front = Ports(*(free := free_base_port(), free + 1, free + 2))
    serving = serve(
        "--model", str(model), "--router", "--router-port", str(front.http), base_port=free + 10
    )
    serving.until("ready;")
    assert any(
        line.startswith(f"router: HTTP http://127.0.0.1:{front.http}") for line in serving.lines
    )
    client, routed = Grpc(f"127.0.0.1:{serving.ports.grpc}"), Grpc(f"127.0.0.1:{front.grpc}")
    expected, meta = routed.edit(plain_edit(num_inference_steps=20))
    assert meta["worker"] == "worker-0"
    serving.files_are_private()

    # Killed in the middle of an edit: the client is told at once, and the worker comes back.
    doomed = client.begin(plain_edit(num_inference_steps=1000, request_id="doomed"))
    eventually("the edit runs", lambda: client.control(op="status")["running"])
    serving.child("denoiser").send_signal(signal.SIGKILL)
    with pytest.raises(InferenceServerException, match=r"\[ENGINE_FAILED\]"):
        doomed.wait()
    assert "has died" in serving.until("failed:") or "silent" in serving.lines[-1]
    serving.until("ready after")
    [router] = [
        process
        for process in psutil.Process(serving.process.pid).children()
        if "maskserve_router" in process.cmdline()
    ]
    # Linux weighs sessions alike: only within one do the router's niced threads give way to steps.
    pids = (router.pid, serving.child("denoiser").pid, serving.process.pid)
    assert len({os.getsid(pid) for pid in pids}) == 1
    assert len({os.getpgid(pid) for pid in pids}) == 3
    router.kill()
    serving.until("router: ready after")
    client.close()
    routed.close()
    client, routed = Grpc(f"127.0.0.1:{serving.ports.grpc}"), Grpc(f"127.0.0.1:{front.grpc}")
    later_image, _ = routed.edit(plain_edit(num_inference_steps=20))
    assert (abs(pixels(later_image).astype(int) - pixels(expected)) <= 1).all()

    # Told to stop in the middle of many edits: those that were accepted are finished.
    accepted: list[Pending] = [
        by.begin(plain_edit(num_inference_steps=400, seed=i))
        for i, by in enumerate((client, routed) * 6)
    ]
    eventually("they are accepted", lambda: client.control(op="status")["in_flight"] == 12)
    serving.process.send_signal(signal.SIGTERM)
    assert re.search(r"stopping; [1-9]\d* edits in flight", serving.until("edits in flight"))
    for pending in accepted:
        image, meta = pending.wait()
        assert meta["event"] == "final"
        assert pixels(image).shape == (64, 64, 3)
    assert serving.wait() == 0
    assert serving.lines[-1] == "stopped"
    client.close()
    routed.close()
    check_free("127.0.0.1", front)
    serving.nothing_left()


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(serve: Callable[..., Serving], model: Path) -> None:
    serving = serve("--model", str(model))
    serving.until("ready;")
    client = Grpc(f"127.0.0.1:{serving.ports.grpc}")
    long = client.begin(plain_edit(num_inference_steps=1000))
    eventually("the edit runs", lambda: client.control(op="status")["running"])
    serving.process.send_signal(signal.SIGTERM)
    serving.until("stopping;")
    serving.process.send_signal(signal.SIGTERM)
    assert serving.wait() == 1  # 0: it would have waited for the edit
    with pytest.raises(InferenceServerException):
        long.wait(5)
    client.close()
    serving.nothing_left()


@pytest.mark.slow
def test_past_the_grace_edits_are_refused(serve: Callable[..., Serving], model: Path) -> None:
    serving = serve("--model", str(model), "--drain-grace", "0.2")
    serving.until("ready;")
    client = Grpc(f"127.0.0.1:{serving.ports.grpc}")
    long = client.begin(plain_edit(num_inference_steps=1000))
    eventually("the edit runs", lambda: client.control(op="status")["running"])
    serving.process.send_signal(signal.SIGTERM)
    with pytest.raises(InferenceServerException, match=r"\[OVERLOADED\] the worker is stopping"):
        long.wait(10)
    assert serving.wait() == 1
    assert serving.lines[-1] == "stopped; not every accepted edit was finished"
    client.close()
    serving.nothing_left()
