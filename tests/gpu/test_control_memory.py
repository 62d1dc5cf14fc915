"""A ControlNet service of another process whose residuals stay in the device's memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from maskserve_benchmarks.steps.replay import refreshed_every
from maskserve_common.config_file import config_of
from maskserve_common.errors import EngineFailed
from maskserve_engine.base.job import ControlInput
from maskserve_engine.control_link.opening import OpenedControl, Opening, OpeningMessage
from maskserve_engine.control_link.served import (
    RowRequest,
    ServedRow,
    request_residuals,
)
from maskserve_engine.control_link.services import ControlService, ControlServices
from maskserve_engine.control_link.transport import SocketMessages
from maskserve_engine.stages.loader import dtype_of
from maskserve_studies.adapters.service_process import PATIENCE_S, PipeCalls, service_process
from tests.fakes.multiplying_net import PLACES, MultiplyingNet, residual

NET, STEPS, SHAPE = "net", 6, (4096, 64)
AMPLE = 2**28


class SharedCalls:
    """Calls of several denoisers: one that ends leaves them to the others."""

    def __init__(self, calls: PipeCalls) -> None:
        self.call = calls.call

    def close(self) -> None:
        """They are the test's."""


@contextmanager
def serving(device: torch.device, ipc_bytes: int) -> Iterator[PipeCalls]:
    tables = {"model": {"device": str(device)}, "controls": {"ipc_bytes": ipc_bytes}}
    with service_process(MultiplyingNet(), config=config_of(tables)) as calls:
        yield calls


def denoiser(calls: PipeCalls, device: torch.device, *, lent: bool) -> ControlServices:
    """Another one's; `lent`: whether it opens what it is lent."""
    dtype = str(dtype_of(config_of({"model": {"device": str(device)}}))).removeprefix("torch.")
    connect = partial(SocketMessages, device=device)
    service = ControlService(SharedCalls(calls), device, dtype, PATIENCE_S, connect)
    services = ControlServices.of(service)
    services.load(NET, NET, NET, PATIENCE_S)
    assert service._link is not None
    assert (service._link.messages.lent is not None) == (lent and device.type == "cuda")
    return services


def opened(service: ControlServices) -> ServedRow:
    control = OpenedControl.of(ControlInput(NET, np.zeros((0, 0, 3), np.uint8)))
    plan = refreshed_every(1, STEPS)
    return service.open(Opening(OpeningMessage((control,), tuple(range(STEPS)), plan), {}))


def ask(rows: list[ServedRow], step: int, device: torch.device) -> list[Tensor]:
    """Begin a step of rows; what they are of."""
    samples = [torch.randn(SHAPE, device=device, dtype=torch.bfloat16) for _ in rows]
    requests = [RowRequest(row, step, x) for row, x in zip(rows, samples, strict=True)]
    request_residuals(requests, batch=1)
    return samples


def check(row: ServedRow, sample: Tensor) -> None:
    for place in range(PLACES):
        tensor = row.after(place)
        assert tensor is not None
        assert torch.equal(tensor, residual(sample, place))


@pytest.mark.parametrize("ipc_bytes", [0, AMPLE, 2**23])
def test_residuals_are_the_same_bytes(device: torch.device, ipc_bytes: int) -> None:
    """Through host memory, through the device's, and where that has room for some."""
    with serving(device, ipc_bytes) as calls:
        service = denoiser(calls, device, lent=ipc_bytes > 0)
        rows = [opened(service) for _ in range(3)]
        for step in range(STEPS):
            samples = ask(rows, step, device)
            for row, sample in zip(rows, samples, strict=True):
                check(row, sample)
        service.close()


def test_sessions_that_end_leave_room_for_others(device: torch.device) -> None:
    """Until their places have rested, residuals of the next ones pass host memory."""
    with serving(device, 2**25) as calls:
        for number in range(6):
            service = denoiser(calls, device, lent=True)
            row = opened(service)
            for step in range(2):
                [sample] = ask([row], step, device)
                check(row, sample)
            if number % 2:
                row.close()
                row.link_rows[0].link._pool.submit(int).result()  # the service has been told
            service.close()


def test_a_service_that_is_killed_takes_nothing_of_the_denoiser_with_it(
    device: torch.device,
) -> None:
    """Neither what is being read as it dies, nor anything behind it."""
    for _ in range(2):
        with serving(device, AMPLE) as calls:
            service = denoiser(calls, device, lent=True)
            row = opened(service)
            [sample] = ask([row], 0, device)
            check(row, sample)
            [sample] = ask([row], 1, device)
            if device.type == "cuda":
                torch.cuda._sleep(10**8)
            tensors = [row.after(place) for place in range(PLACES)]
            [spawned] = multiprocessing.active_children()
            assert spawned.pid is not None
            os.kill(spawned.pid, signal.SIGKILL)
            spawned.join()
            for place, tensor in enumerate(tensors):
                assert tensor is not None
                assert torch.equal(tensor, residual(sample, place))
            with pytest.raises(EngineFailed, match="the ControlNet service was lost"):
                ask([row], 2, device)
            service.close()
        assert torch.ones(8, device=device).sum() == 8


def test_what_two_denoisers_are_lent_is_their_own(device: torch.device) -> None:
    with serving(device, AMPLE) as calls:
        services = [denoiser(calls, device, lent=True) for _ in range(2)]
        rows = [opened(service) for service in services]
        for step in range(STEPS):
            samples = [ask([row], step, device)[0] for row in rows]
            for row, sample in zip(rows, samples, strict=True):
                check(row, sample)
        for service in services:
            service.close()
