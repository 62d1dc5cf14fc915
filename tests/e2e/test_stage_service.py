"""Two workers whose encoder and decoder a Triton of their own runs: edits are those of a worker
alone, byte for byte, also while that server is killed, and are refused once it is gone for good.
"""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from maskserve_client.client import Client
from maskserve_client.events import Preview
from maskserve_common.errors import MaskserveError
from maskserve_common.files.stages import NO_ANSWER
from maskserve_common.liveness import signed_in
from maskserve_serving.errors import ServeError
from maskserve_serving.service import ServiceProcess
from maskserve_serving.supervisor import Supervisor
from maskserve_serving.worker import WorkerProcess
from tests.fakes.pictures import encode, scene
from tests.support.calls import Pixels, pixels
from tests.support.eventually import eventually

SIDE, EDITS = 64, 6
MASK = np.zeros((SIDE, SIDE), np.uint8)
MASK[16:48, 8:40] = 255


def edit(worker: WorkerProcess, number: int, **more: Any) -> Pixels:
    """One of pictures that differ, with a prompt that nobody else has; its bytes do not depend on
    who shares a call of the text encoder.
    """
    source = np.roll(scene(SIDE, SIDE), number, axis=1)
    settings: dict[str, Any] = {"num_inference_steps": 4, "cache": "off", "seed": number}
    settings |= {"reproducible": True, **more}
    with Client(worker.grpc_url) as client:
        prompt = f"a red star {number}"
        return pixels(
            client.edit(encode(source), encode(MASK), prompt, timeout=600, **settings).encoded
        )


@pytest.fixture(scope="module")
def site(pair: Supervisor) -> Supervisor:
    return pair


@pytest.fixture(scope="module")
def expected(site: Supervisor) -> list[Pixels]:
    """Pictures of the first worker."""
    return [edit(site.workers[0], number) for number in range(EDITS)]


def service_of(site: Supervisor) -> ServiceProcess:
    return next(service for service in site.services if service.name == "encoder-decoder-0")


def of_both(site: Supervisor) -> list[tuple[int, WorkerProcess]]:
    """Each of the edits at each worker."""
    return [(number, worker) for number in range(EDITS) for worker in site.workers]


@pytest.fixture(scope="module")
def takes_s(site: Supervisor) -> float:
    """All of them at once, while nothing is killed."""
    begin = time.monotonic()
    with ThreadPoolExecutor(len(of_both(site))) as pool:
        list(pool.map(lambda pair: edit(pair[1], pair[0]), of_both(site)))
    return time.monotonic() - begin


def wait_for(future: Future[Pixels], expected_pixels: Pixels | None) -> None:
    """An edit has its right picture, or none and the one sentence."""
    error = future.exception(600)
    if error is not None:
        assert NO_ANSWER in str(error)
    elif expected_pixels is not None:
        assert future.result().tolist() == expected_pixels.tolist()


def status(worker: WorkerProcess) -> dict[str, Any]:
    with Client(worker.grpc_url) as client:
        record: dict[str, Any] = client.control("status")
        return record


def nodes(worker: WorkerProcess) -> dict[str, str]:
    return {node["name"]: node["state"] for node in status(worker)["nodes"]}


def rows(worker: WorkerProcess) -> list[Any]:
    return list(status(worker)["running"])


def test_workers_give_the_same_bytes(site: Supervisor, expected: list[Pixels]) -> None:
    source, outside = scene(SIDE, SIDE), MASK == 0
    for number, expected_picture in enumerate(expected):
        assert edit(site.workers[1], number).tolist() == expected_picture.tolist()
        assert np.array_equal(expected_picture[outside], np.roll(source, number, axis=1)[outside])
    ready = {"denoiser": "ready", "encoder": "ready", "decoder": "ready"}
    assert [nodes(worker) for worker in site.workers] == [ready, ready]


# tests/unit/engine/stages/test_shared_stages.py holds it of real stages in this process.
@pytest.mark.slow
def test_shared_stages_give_the_bytes_of_own_ones(
    site: Supervisor, expected: list[Pixels], worker: WorkerProcess
) -> None:
    for number, shared in enumerate(expected):
        assert edit(worker, number).tolist() == shared.tolist()
    single_pictures = [edit(server, 0, reproducible=False) for server in (worker, site.workers[0])]
    assert single_pictures[0].tolist() == single_pictures[1].tolist()


def test_templates_are_primed_and_previews_come(site: Supervisor) -> None:
    primed = {"cache": "require", "preview_every": 2}
    picture, other_picture = (edit(server, 7, **primed) for server in site.workers)
    assert picture.tolist() == other_picture.tolist()
    with Client(site.workers[0].grpc_url) as client:
        events = list(
            client.edit_stream(
                encode(scene(SIDE, SIDE)),
                encode(MASK),
                "x",
                num_inference_steps=200,  # time for a preview to be made
                preview_every=2,
            )
        )
    assert any(isinstance(event, Preview) for event in events)


# tests/triton/test_stages.py holds what is asked again, in this process.
@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_edits_wait_while_the_service_is_killed_and_none_is_wrong(
    site: Supervisor,
    expected: list[Pixels],
    takes_s: float,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Server, encoder and decoder in turn, at moments drawn where the test runs."""
    monkeypatch.setattr(site, "_backoff_s", [1.0])  # it grows where kills follow one another
    service, restarts = service_of(site), [worker.restarts for worker in site.workers]
    restarts_before = service.restarts
    running = dict(signed_in(service.config.runtime_dir))
    pid = [service.pid, running["encoder"], running["decoder"]][number % 3]
    assert pid is not None
    with ThreadPoolExecutor(len(of_both(site))) as pool:
        pending = [(n, pool.submit(edit, worker, n)) for n, worker in of_both(site)]
        time.sleep(random.uniform(0.0, takes_s))
        os.kill(pid, signal.SIGKILL)
        for n, future in pending:
            wait_for(future, expected[n])
    eventually("it is started again", lambda: service.restarts > restarts_before, 600)
    eventually("it answers", service.ready, 600)
    for worker in site.workers:
        eventually("none is missed", lambda w=worker: "loading" not in nodes(w).values(), 600)
        assert edit(worker, 0).tolist() == expected[0].tolist()
    assert [worker.restarts for worker in site.workers] == restarts


@pytest.mark.slow
def test_a_service_gone_for_good_leaves_no_edit_hanging_and_no_worker_ready(
    site: Supervisor, expected: list[Pixels], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, restarts = service_of(site), [worker.restarts for worker in site.workers]

    def refuse() -> None:
        raise ServeError("gone for good")

    with monkeypatch.context() as patch, ThreadPoolExecutor(len(of_both(site))) as pool:
        patch.setattr(service, "start", refuse)
        pending = [
            (n, pool.submit(edit, worker, n, num_inference_steps=200))
            for n, worker in of_both(site)
        ]
        eventually("rows run", lambda: all(rows(worker) for worker in site.workers))
        service.signal_group()
        for _, future in pending:  # rows finish; what they have made cannot be decoded
            wait_for(future, None)
        for worker in site.workers:
            eventually("it is missed", lambda w=worker: nodes(w)["encoder"] == "loading", 600)
            assert nodes(worker)["denoiser"] == "ready"
            assert (rows(worker), worker.in_flight()) == ([], 0)
            with pytest.raises(MaskserveError, match=NO_ANSWER):
                edit(worker, 0)
    for worker in site.workers:
        eventually("it is back", lambda w=worker: "loading" not in nodes(w).values(), 600)
        assert edit(worker, 0).tolist() == expected[0].tolist()
    assert [worker.restarts for worker in site.workers] == restarts
