"""Workers of several devices behind a real Triton; on a CPU a device is a process of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import pytest
from tritonclient.utils import InferenceServerException

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor
from tests.support.calls import Grpc, pixels, plain_edit
from tests.support.eventually import eventually

RANK = "maskserve_engine.gangs.rank"


@contextmanager
def worker_of(
    devices: Literal[1, 2, 4, 8], model: Path, folder: Path, policy: str
) -> Iterator[Supervisor]:
    config = folder / "config.toml"
    config.write_text(f'[engine]\npolicy = "{policy}"\n', encoding="utf-8")
    options = ServeOptions(
        model=str(model),
        config=config,
        devices_per_worker=devices,
        base_port=free_base_port(),
        log_dir=folder / "logs",
        entries=folder / "entries",
    )
    with Supervisor(options) as supervisor:
        yield supervisor


@pytest.fixture(scope="module")
def devices(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    with worker_of(2, model, tmp_path_factory.mktemp("devices"), "deadline") as supervisor:
        yield supervisor


@pytest.fixture
def edits(devices: Supervisor) -> Iterator[Grpc]:
    client = Grpc(devices.workers[0].grpc_url)
    yield client
    client.close()


def ranks(devices: Supervisor) -> list[psutil.Process]:
    """The oldest first."""
    pid = devices.workers[0].pid
    assert pid is not None
    below = psutil.Process(pid).children(recursive=True)
    processes = [process for process in below if process.is_running() and RANK in process.cmdline()]
    return sorted(processes, key=lambda process: process.create_time())


def test_pictures_are_those_of_one_device(edits: Grpc, grpc: Grpc) -> None:
    for seed in range(4):
        image, meta = edits.edit(plain_edit(seed=seed, cache="off"))
        reference_image, _ = grpc.edit(plain_edit(seed=seed, cache="off"))
        difference = pixels(image).astype(int) - pixels(reference_image).astype(int)
        assert np.abs(difference).max() <= 1
        assert meta["event"] == "final"


def test_a_template_is_primed_once_and_read_by_both(edits: Grpc) -> None:
    with ThreadPoolExecutor(8) as pool:
        inputs = [plain_edit(seed=1, cache="require") for _ in range(8)]
        metas = [meta for _, meta in pool.map(edits.edit, inputs)]
    assert {meta["cache"] for meta in metas} == {"hit"}


def test_edits_that_are_due_say_how_they_ended(edits: Grpc) -> None:
    inputs = [
        plain_edit(seed=1, deadline_ms=limit, on_late="finish", num_inference_steps=20)
        for limit in (1, 60_000, 1, 60_000)
    ]
    with ThreadPoolExecutor(4) as pool:
        metas = [meta for _, meta in pool.map(edits.edit, inputs)]
    assert [meta["slo"] for meta in metas] == ["late", "met", "late", "met"]
    with pytest.raises(InferenceServerException, match="DEADLINE_EXCEEDED"):
        edits.edit(plain_edit(num_inference_steps=1000, deadline_ms=1))


def all_back(devices: Supervisor) -> bool:
    log = devices.workers[0].spec.log.with_suffix(".jsonl").read_text(encoding="utf-8")
    return log.count("it is started again") == log.count(" is back")


@pytest.mark.parametrize(
    "number", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_no_edit_is_lost_with_a_rank(
    devices: Supervisor, edits: Grpc, number: signal.Signals
) -> None:
    eventually("two ranks", lambda: len(ranks(devices)) == 2, 60.0)
    eventually("each can take steps", lambda: all_back(devices), 60.0)
    # One with refresh steps has one more of these where it goes on: another picture.
    inputs = plain_edit(seed=3, num_inference_steps=100, cache="off")
    expected = pixels(edits.edit(inputs)[0]).astype(int)
    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(edits.edit, inputs) for _ in range(6)]
        killed_rank = ranks(devices)[-1]
        killed_rank.send_signal(number)
        eventually("it is replaced", lambda: not killed_rank.is_running())
        for edit in futures:
            assert np.abs(pixels(edit.result()[0]).astype(int) - expected).max() <= 1
    eventually("it is back", lambda: all_back(devices), 60.0)
    assert devices.workers[0].restarts == 0


# A rank ends with its pipe: tests/unit/engine/gangs/test_rank.py; restarts: test_serve.py.
@pytest.mark.slow
def test_ranks_end_with_the_process_that_schedules(devices: Supervisor) -> None:
    eventually("two ranks", lambda: len(ranks(devices)) == 2, 60.0)
    old = ranks(devices)
    (parent,) = {rank.ppid() for rank in old}
    os.kill(parent, signal.SIGKILL)
    eventually("they end", lambda: not any(rank.is_running() for rank in old))
    worker = devices.workers[0]
    eventually("the worker is started again", lambda: worker.restarts == 1, 30.0)
    eventually("it is ready", worker.ready, 180.0)
    eventually("two ranks", lambda: len(ranks(devices)) == 2, 60.0)
    client = Grpc(worker.grpc_url)
    assert client.edit(plain_edit(seed=3))[1]["event"] == "final"
    client.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_devices_give_the_pictures_of_one(tmp_path: Path) -> None:
    """The demo model has four heads: one for each."""
    inputs = [
        plain_edit(seed=seed, deadline_ms=limit, on_late="finish", cache=cache)
        for seed, limit in enumerate((1, 60_000, 2000))
        for cache in ("off", "require")
    ]
    pictures = []
    for devices in (1, 4):
        folder = tmp_path / str(devices)
        folder.mkdir()
        with worker_of(devices, DEMO_MODEL, folder, "deadline") as worker:
            assert len(ranks(worker)) == (devices if devices > 1 else 0)
            client = Grpc(worker.workers[0].grpc_url)
            with ThreadPoolExecutor(6) as pool:
                answers = list(pool.map(client.edit, inputs))
            client.close()
        assert [meta["cache"] for _, meta in answers] == ["off", "hit"] * 3
        pictures.append([pixels(picture).astype(int) for picture, _ in answers])
    for device_picture, reference in zip(*pictures, strict=True):
        assert np.abs(device_picture - reference).max() <= 1


@pytest.mark.slow  # tests/unit/engine/gangs holds what rounds give
def test_rounds_give_the_same_pictures(model: Path, tmp_path: Path, grpc: Grpc) -> None:
    all_inputs = [
        plain_edit(seed=seed, deadline_ms=limit, on_late="finish")
        for seed, limit in enumerate((1, 60_000, 60_000, 1))
    ]
    with worker_of(2, model, tmp_path, "rounds") as worker:
        client = Grpc(worker.workers[0].grpc_url)
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(client.edit, all_inputs))
        client.close()
    assert [meta["slo"] for _, meta in answers] == ["late", "met", "met", "late"]
    for inputs, (image, _) in zip(all_inputs, answers, strict=True):
        difference = pixels(image).astype(int) - pixels(grpc.edit(inputs)[0]).astype(int)
        assert np.abs(difference).max() <= 1
