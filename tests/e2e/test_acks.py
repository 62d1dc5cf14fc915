"""Many streams through one front: Triton's stub locks up under them, unless events are paced."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import time
from collections.abc import Iterator
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
LOADING_S = 60.0


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """GRPC address of a Triton with the models `burst` and `caller`."""
    ports = Ports.of_worker(free_base_port(), 0)
    options = ServeOptions(model="", repositories=(BURSTS,))
    prefix = region_prefix(ports.http)
    runtime = find_runtime(None, options.cache_dir)
    with (tmp_path / "triton.log").open("wb") as log:
        server = subprocess.Popen(
            command(options, Config(), runtime, ports, prefix),
            env=environment(runtime, tmp_path / "none.toml", None),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + LOADING_S
        while not is_ready(f"http://127.0.0.1:{ports.http}"):
            assert time.monotonic() < end, (tmp_path / "triton.log").read_text(encoding="utf-8")
            time.sleep(0.1)
        yield f"127.0.0.1:{ports.grpc}"
    finally:
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
    """When a newer Triton passes here, acks can go (docs/adr/0006-cancel-and-death.md)."""
    with pytest.raises(queue.Empty):
        calls(url, tmp_path, paced=False, timeout_s=30)
