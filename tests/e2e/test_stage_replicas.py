"""A worker has three Tritons beside it, of which one runs encoder and decoder, and two one each:
while one is killed, no edit is lost, and all have the bytes of a run without a kill.
tests/triton/test_stages.py has replicas in one process.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskserve_client.client import Client
from maskserve_common.liveness import signed_in
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor
from tests.fakes.pictures import encode, scene
from tests.support.calls import Pixels, pixels
from tests.support.draws import fresh_rng
from tests.support.eventually import eventually

pytestmark = pytest.mark.slow

SIDE, EDITS, AT_ONCE, KILLS = 64, 48, 8, 12
MASK = np.zeros((SIDE, SIDE), np.uint8)
MASK[16:48, 8:40] = 255


@pytest.fixture(scope="module")
def site(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    options = ServeOptions(
        model=str(model),
        services=("encoder,decoder@cpu", "encoder@cpu", "decoder@cpu"),
        base_port=free_base_port(3),
        entries=None,
        log_dir=tmp_path_factory.mktemp("replicas"),
        report=print,
    )
    with Supervisor(options) as running:
        yield running


def edits(site: Supervisor) -> list[Pixels]:
    """Different edits, several at a time; none may fail."""

    def edit(number: int) -> Pixels:
        source = np.roll(scene(SIDE, SIDE), number, axis=1)
        settings: dict[str, Any] = {"num_inference_steps": 4, "cache": "off", "seed": number}
        prompt = f"a red star {number}"
        with Client(site.workers[0].grpc_url) as client:
            answer = client.edit(
                encode(source), encode(MASK), prompt, reproducible=True, timeout=600, **settings
            )
        return pixels(answer.encoded)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(edit, range(EDITS)))


def services(site: Supervisor) -> dict[str, str]:
    with Client(site.workers[0].grpc_url) as client:
        records = client.control("status")["services"]
    return {f"{record['model']} {record['name']}": record["state"] for record in records}


@pytest.fixture(scope="module")
def expected(site: Supervisor) -> list[Pixels]:
    return edits(site)


@pytest.fixture(scope="module")
def takes_s(site: Supervisor, expected: list[Pixels]) -> float:
    begin = time.monotonic()
    edits(site)
    return time.monotonic() - begin


@pytest.mark.parametrize("number", range(KILLS))
def test_no_edit_is_lost_while_a_replica_is_killed(
    site: Supervisor,
    expected: list[Pixels],
    takes_s: float,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each server and its models in turn, at a drawn moment."""
    monkeypatch.setattr(site, "_backoff_s", [1.0])  # it grows where kills follow one another
    service = site.services[number % 3]
    restarts, worker_restarts = service.restarts, site.workers[0].restarts
    running = dict(signed_in(service.config.runtime_dir))
    pids = [service.pid, *(running[model] for model in service.hosted.models)]
    pid = pids[number // 3 % len(pids)]
    assert pid is not None
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(edits, site)
        time.sleep(fresh_rng().uniform(0.0, 0.8 * takes_s))
        os.kill(pid, signal.SIGKILL)
        pictures = pending.result(600)
    assert [picture.tolist() for picture in pictures] == [item.tolist() for item in expected]
    eventually("it is started again", lambda: service.restarts > restarts, 600)
    eventually("it answers", service.ready, 600)
    eventually("none is missed", lambda: set(services(site).values()) == {"ready"}, 60)
    names = {f"{model} {x.grpc_url}" for x in site.services for model in x.hosted.models}
    assert services(site).keys() == names
    assert site.workers[0].restarts == worker_restarts
