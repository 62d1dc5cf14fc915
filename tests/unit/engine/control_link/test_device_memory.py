"""Residuals in device memory, but for CUDA's own part: who lends, opens, reads and lets go.

On a GPU: tests/gpu/test_control_memory.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from maskserve_common.errors import EngineFailed
from maskserve_engine.base.job import ControlInput, EditJob
from maskserve_engine.control_link import device_memory
from maskserve_engine.control_link.device_memory import LentBlock
from maskserve_engine.control_link.transport import SocketMessages
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.loop.local_executor import LocalExecutor
from maskserve_engine.requests.executor import PlainRowSpec, StepInput
from tests.fakes.control_nets import random_net
from tests.fakes.cuda_ipc import FakeIpc
from tests.fakes.jobs import config_of, encode_case, random_case
from tests.support.control_service import Service, over_tcp
from tests.support.draws import fresh_rng
from tests.support.eventually import eventually

CPU = torch.device("cpu")
AMPLE, STEPS = 2**24, 4
to_device = partial(SocketMessages, device=CPU)


@pytest.fixture
def ipc(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeIpc]:
    fake = FakeIpc(monkeypatch)
    yield fake
    assert not fake.mistakes


class Site:
    def __init__(self, model: Path, folder: Path) -> None:
        config = config_of(model)
        self.encoder, self.adapter = load_encoder(config), load_adapter(config)
        self._model, self._folder = model, folder
        self.net = random_net(1, 1, 1)

    @contextmanager
    def service(self, ipc_bytes: int) -> Iterator[Service]:
        folder = self._folder / str(ipc_bytes)
        service = Service(self._model, folder, {"one": self.net}, ipc_bytes=ipc_bytes)
        try:
            yield service
        finally:
            service.close()

    def jobs(self, adapters: str = "exact") -> list[EditJob]:
        """Two with control; its version is the service's."""
        rng, jobs = fresh_rng(), []
        for name in ("a", "b"):
            case = random_case(rng, num_inference_steps=STEPS, strength=1.0, adapters=adapters)
            picture = rng.integers(0, 256, case.pixels.shape, dtype=np.uint8)
            moments = self.encoder.encode(picture, case.mask, "").moments
            control = ControlInput("", picture, moments=moments)
            jobs.append(replace(encode_case(self.encoder, case, name), controls=(control,)))
        return jobs

    def run(self, service: Service, jobs: list[EditJob], connect: Any) -> list[Any]:
        """Results of the jobs, batched."""
        executor = LocalExecutor(self.adapter, None, service.denoiser(connect=connect))
        results: list[Any] = []
        for job in jobs:
            control = replace(job.controls[0], net=service.versions["one"])
            controlled_job = replace(job, controls=(control,))
            executor.make(job.request.request_id, PlainRowSpec(controlled_job))
        for number in range(STEPS):
            executor.step(StepInput(number + 1, ("a", "b")), results.append)
            assert not results[-1].failed
        pixels = [executor.result(name).array() for name in ("a", "b")]
        for name in ("a", "b"):
            executor.release(name)
        rows = service.front.service.sessions
        eventually("no row is left", lambda: rows.counts()["rows"] == 0)
        executor.close()
        return pixels


@pytest.fixture
def site(tiny_inpaint: Path, tmp_path: Path) -> Site:
    return Site(tiny_inpaint, tmp_path)


def block_of(service: Service) -> LentBlock:
    block = service.front.service._lent
    assert block is not None
    return block


def same(one: list[Any], other: list[Any]) -> bool:
    assert not np.array_equal(one[0], one[1])
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("adapters", ["exact", "fast"])
def test_edits_are_the_same_bytes_through_device_memory(
    site: Site, ipc: FakeIpc, adapters: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, or those that have room; from another host none."""
    jobs = site.jobs(adapters)
    written: list[int | None] = []
    least, put = AMPLE, LentBlock.put

    def puts(block: LentBlock, *args: Any) -> int | None:
        nonlocal least
        written.append(place := put(block, *args))
        least = min(least, block.free())
        return place

    monkeypatch.setattr(LentBlock, "put", puts)
    with site.service(0) as service:
        expected = site.run(service, jobs, to_device)
    assert (ipc.reads, written) == (0, [])
    with site.service(AMPLE) as service:
        whole = block_of(service).free()
        assert same(expected, site.run(service, jobs, to_device))
        if adapters == "exact":  # once each, though several blocks of the base add the same
            assert ipc.reads == len(written)
        assert ipc.reads >= STEPS
        assert None not in written
        assert block_of(service).free() == whole
        half = AMPLE - whole + (whole - least) // 2
        written.clear()
        assert same(expected, site.run(service, jobs, over_tcp))
        assert same(expected, site.run(service, jobs, SocketMessages))  # it opens none
        assert written == []
        before = ipc.reads
    with site.service(half) as service:
        whole = block_of(service).free()
        assert same(expected, site.run(service, jobs, to_device))
        assert None in written
        assert ipc.reads > before
        assert block_of(service).free() == whole


@pytest.mark.parametrize("why", ["refused", "wrong"])
def test_what_cannot_be_opened_passes_host_memory_and_the_log_says_so_once(
    site: Site, ipc: FakeIpc, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = site.jobs()
    with site.service(0) as service:
        expected = site.run(service, jobs, to_device)
    ipc.refuses, ipc.wrong = "peer access is not supported" * (why == "refused"), why == "wrong"
    with site.service(AMPLE) as service, caplog.at_level(logging.WARNING):
        assert same(expected, site.run(service, jobs, to_device))
    [message] = caplog.messages
    assert "pass host memory: the service's device memory cannot be opened: " in message
    assert ("not supported" if ipc.refuses else "cpu reads something else there") in message
    assert ipc.reads == 0


def test_a_service_that_has_none_to_lend_says_so_and_serves(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), site.service(AMPLE) as service:
        site.run(service, site.jobs(), to_device)
    assert caplog.messages == [
        "residuals pass host memory: [controls] ipc_bytes: cpu is not a CUDA device"
    ]


def test_nothing_is_read_of_a_service_that_has_ended(
    site: Site, ipc: FakeIpc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though messages have come that say where: that may be another's by then."""
    jobs = site.jobs()
    with site.service(AMPLE) as service:
        executor = LocalExecutor(site.adapter, None, service.denoiser(connect=to_device))
        control = replace(jobs[0].controls[0], net=service.versions["one"])
        executor.make("a", PlainRowSpec(replace(jobs[0], controls=(control,))))
        results: list[Any] = []
        ask = SocketMessages.request

        def ask_and_close(messages: SocketMessages, message: Any) -> None:
            ask(messages, message)
            before = ipc.reads
            eventually("it answers", messages.has_next)
            service.front.service.close()
            assert ipc.reads == before

        executor.step(StepInput(1, ("a",)), results.append)
        assert not results[-1].failed
        before = ipc.reads
        monkeypatch.setattr(SocketMessages, "request", ask_and_close)
        executor.step(StepInput(2, ("a",)), results.append)
        assert isinstance(results[-1].failed["a"], EngineFailed)
        assert "it has ended" in str(results[-1].failed["a"])
        assert ipc.reads == before


def test_places_of_a_session_that_ended_rest_for_a_while(
    site: Site, ipc: FakeIpc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its denoiser may have been killed, or given up; what it was told to read it still may."""
    jobs = site.jobs()
    with site.service(AMPLE) as service:
        whole = block_of(service).free()
        executor = LocalExecutor(site.adapter, None, service.denoiser(connect=to_device))
        control = replace(jobs[0].controls[0], net=service.versions["one"])
        executor.make("a", PlainRowSpec(replace(jobs[0], controls=(control,))))
        executor.step(StepInput(1, ("a",)), [].append)
        free = block_of(service).free()
        assert free < whole
        sessions = service.front.service.sessions
        executor.close()
        eventually("its session has ended", lambda: sessions.counts()["sessions"] == 0)
        assert block_of(service).free() == free
        ipc.catch_up()  # in so long
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + 60)
        monkeypatch.setattr(device_memory, "time", later)
        assert block_of(service).free() == whole


def test_places_never_overlap_and_none_is_lost(ipc: FakeIpc) -> None:
    rng = fresh_rng()
    block, lent_places = (
        LentBlock(2**14, CPU),
        dict[tuple[str, int], list[tuple[int, torch.Tensor]]](),
    )
    whole, full = block.free(), 0
    for row in "abc":
        block.open(row)
    for _ in range(400):
        row, slot = str(rng.choice(list("abcd"))), int(rng.integers(3))
        match int(rng.integers(6)):
            case 0:
                block.clear(row, slot)
                lent_places.pop((row, slot), None)
            case 1 if row != "d" and rng.random() < 0.3:
                block.close(row, read=True)
                lent_places = {at: place for at, place in lent_places.items() if at[0] != row}
                block.open(row)
            case _:
                x = torch.randn(int(rng.integers(0, 500)))
                if (begin := block.put(row, slot, x)) is not None:
                    lent_places.setdefault((row, slot), []).append((begin, x))
                else:
                    full += row != "d"
        assert ("d", slot) not in lent_places  # nobody opened it
        for begin, x in (place for places in lent_places.values() for place in places):
            assert torch.equal(device_memory._view(block._block, begin, x.shape, x.dtype), x)
    assert full
    for row in "abc":
        block.close(row, read=True)
    assert block.free() == whole
    assert len(block._free) == 1
