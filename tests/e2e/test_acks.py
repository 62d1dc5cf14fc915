"""Many streams through one front: Triton's stub locks up under them, unless events are paced."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton_grpc

from maskserve_benchmarks.triton_calls import tensors
from maskserve_common.config import Config
from maskserve_serving.command import command, environment
from maskserve_serving.heartbeat import is_ready
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import Ports, free_base_port
from maskserve_serving.runtime import find_runtime
from maskserve_serving.shm_cleanup import region_prefix, remove_regions

ROOT = Path(__file__).parents[2]
BURSTS = ROOT / "tests" / "fakes" / "bursts"
THREADS, CALLS, EVENTS = 16, 1000, 8
LOADING_S = 120.0


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """GRPC address of a Triton with the models `burst` and `caller`."""
    ports = Ports.of_worker(free_base_port(), 0)
    options = ServeOptions(model="", repositories=(BURSTS,))
    prefix = region_prefix(ports.http)
    runtime = find_runtime(None, options.cache_dir)
    log_file, end = tmp_path / "triton.log", time.monotonic() + LOADING_S

    def start() -> subprocess.Popen[bytes]:
        with log_file.open("ab") as log:
            return subprocess.Popen(
                command(options, Config(), runtime, ports, prefix),
                env=environment(runtime, tmp_path / "none.toml", None),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    server = start()
    try:
        while not is_ready(f"http://127.0.0.1:{ports.http}"):
            assert time.monotonic() < end, log_file.read_text(encoding="utf-8")
            if server.poll() is not None:  # a stub that could not lock in time ends its Triton
                remove_regions(prefix)
                server = start()
            time.sleep(0.1)
        yield f"127.0.0.1:{ports.grpc}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        remove_regions(prefix)


def calls(url: str, runtime_dir: Path, *, paced: bool, timeout_s: float) -> list[int]:
    """Events that came before the final one, for each of CALLS calls; queue.Empty if too late."""
    settings: dict[str, Any] = {
        "paced": paced,
        "threads": THREADS,
        "calls": CALLS,
        "events": EVENTS,
        "runtime_dir": str(runtime_dir),
    }
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    client = triton_grpc.InferenceServerClient(url)
    client.start_stream(lambda result, error: answers.put((result, error)))
    try:
        inputs = tensors(triton_grpc, {"ASKED": json.dumps(settings).encode()})
        client.async_stream_infer("caller", inputs)
        result, error = answers.get(timeout=timeout_s)
    finally:
        client.stop_stream(cancel_requests=True)
        client.close()
    assert error is None, error
    event_counts: list[int] = json.loads(result.as_numpy("META")[0])
    return event_counts


def test_paced_events_all_arrive(url: str, tmp_path: Path) -> None:
    assert calls(url, tmp_path, paced=True, timeout_s=120) == [EVENTS] * CALLS


@pytest.mark.slow
def test_without_pace_the_stub_locks_up(url: str, tmp_path: Path) -> None:
    """When a newer Triton passes here, acks can go (docs/adr/0006-cancel-and-death.md). It takes a
    race, which a busy machine may miss.
    """
    for _ in range(10):
        try:
            calls(url, tmp_path, paced=False, timeout_s=30)
        except queue.Empty:
            return
    pytest.fail("no event was lost in ten runs")
