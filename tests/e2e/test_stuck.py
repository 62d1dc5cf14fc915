"""A worker that answers for its health while its edits do not come through is restarted.

Each harm is a file that a model's process opens, replaced by a pipe that nobody writes to: as on a
disk that is gone, the process waits in the kernel, alive, and Triton says that it is ready.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from maskserve_benchmarks.router_site import RouterSite
from maskserve_serving.heartbeat import is_ready
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor
from maskserve_serving.worker import WorkerProcess
from tests.support.calls import (
    Grpc,
    InferenceServerException,
    eventually,
    pixels,
    plain_edit,
    stream,
)

STUCK = "0" * 32
"""Id of a template whose file cannot be read to its end."""
PREPROCESSES = 2
RESTARTED_S = 120.0
CLIENTS = 12


@pytest.fixture(scope="module")
def report_lines() -> list[str]:
    return []


@pytest.fixture(scope="module")
def workers(
    model: Path,
    worker: WorkerProcess,
    report_lines: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[list[WorkerProcess]]:
    """One that is harmed, and one that all tests share and nobody harms."""
    folder = tmp_path_factory.mktemp("stuck")
    config = folder / "maskserve.toml"
    config.write_text("[engine]\nstuck_timeout_s = 2.0\nheartbeat_timeout_s = 3.0\n")
    options = ServeOptions(
        model=str(model),
        base_port=free_base_port(),
        config=config,
        log_dir=folder / "logs",
        report=report_lines.append,
    )
    with Supervisor(options) as supervisor:
        all_workers = [*supervisor.workers, worker]
        for server in all_workers:
            edited(server.grpc_url)
        yield all_workers


def edited(url: str) -> bytes:
    with closing(Grpc(url)) as client:
        return client.edit(plain_edit(seed=7))[0]


def outcome_of(url: str, **settings: object) -> str:
    """Run an edit and return "done" or the error's text."""
    try:
        with closing(Grpc(url)) as client:
            client.edit(plain_edit(**settings))
    except InferenceServerException as error:
        return str(error.message())
    return "done"


def came_back(worker: WorkerProcess, restarts: int) -> None:
    eventually("it is restarted", lambda: worker.restarts == restarts, RESTARTED_S)
    eventually("it is ready", lambda: is_ready(worker.http_url), RESTARTED_S)
    edited(worker.grpc_url)


@pytest.mark.slow
def test_long_edits_and_a_queue_behind_them_are_not_stuck(workers: list[WorkerProcess]) -> None:
    """Nothing comes back for longer than the limit: whoever judges by that restarts here."""
    url = workers[0].grpc_url
    with ThreadPoolExecutor(3 * CLIENTS) as pool:
        futures = [
            pool.submit(outcome_of, url, num_inference_steps=1000, seed=n)
            for n in range(3 * CLIENTS)
        ]
        assert {future.result() for future in futures} == {"done"}
    assert workers[0].restarts == 0


# tests/unit holds each link: what is stuck (triton/test_traffic.py), that the worker's supervisor
# starts it again (serving), and what its router's clients get (router/test_router_faults.py).
@pytest.mark.slow
def test_edits_that_do_not_reach_the_engine(
    workers: list[WorkerProcess], report_lines: list[str], tmp_path: Path
) -> None:
    """A router's clients notice nothing: the other worker does what this one held."""
    worker = workers[0]
    right = pixels(edited(workers[1].grpc_url))
    os.mkfifo(worker.spec.files.templates / STUCK)
    named = {**plain_edit(template_id=STUCK), "IMAGE": b""}
    addresses = [item.grpc_url for item in workers]
    with RouterSite(addresses, tmp_path) as router, ThreadPoolExecutor(CLIENTS) as pool:
        with closing(Grpc(worker.grpc_url)) as client:
            doomed = [client.begin(named) for _ in range(PREPROCESSES)]
            eventually("they have come in", lambda: worker.in_flight() == PREPROCESSES)
            assert is_ready(worker.http_url)
            futures = [pool.submit(edited, router.grpc_url) for _ in range(CLIENTS)]
            for item in doomed:
                with pytest.raises(InferenceServerException, match="edits are stuck before the"):
                    item.wait()
        assert all((pixels(item.result()) == right).all() for item in futures)
        page = router.read("/metrics").decode()
        retries = re.findall(r'retries_total\{.*"worker"\} (\S+)', page)
        assert sum(map(float, retries)) > 0
        came_back(worker, restarts=1)
    assert any("failed: edits are stuck before the engine, for " in line for line in report_lines)


@pytest.mark.slow
def test_a_front_that_takes_no_edits(workers: list[WorkerProcess], report_lines: list[str]) -> None:
    worker = workers[0]
    restarts = worker.restarts
    os.mkfifo(worker.spec.files.runtime / "admission")
    with stream(worker.grpc_url) as opened:
        opened.send(plain_edit(progress=True))
        assert is_ready(worker.http_url)
        assert outcome_of(worker.grpc_url) != "done"
        with pytest.raises(InferenceServerException):
            opened.next()
    came_back(worker, restarts + 1)
    assert any("failed: its edit has not answered for " in line for line in report_lines)
