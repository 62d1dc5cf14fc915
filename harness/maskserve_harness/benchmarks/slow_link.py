"""An edit with a ControlNet in a service that a slow network is before, over the same without.

Devices are emulated, as in `three_controls`, and so is the network: the service's own process sends
what it says when a link of 10 Gbit/s would have brought it, byte by byte (`SlowConnection`). Over
it go residuals of SDXL's shapes, of 1024 pixels with guidance. The base computes at the pace at
which a transfer takes `TRANSFER` of its step. All steps of an edit are timed, the first one, which
nothing can hide, among them: with `adapters: exact`, which waits at each step, and with both
`[controls] fast`.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue
from socket import socket
from typing import Any

import torch

from maskserve_core.config import FastControl
from maskserve_core.contracts.settings import AdapterMode
from maskserve_engine.control_link.opening import OpenedControl, Opening, OpeningFacts
from maskserve_engine.control_link.served import (
    ControlService,
    RowAsk,
    ServedRow,
    ask_service,
    new_batch,
)
from maskserve_engine.control_link.transport import Answered, Connection, Lost
from maskserve_engine.families.control_batches import NetStep, Residual, Send
from maskserve_harness.benchmarks.control_service import PRESET, PipeCalls, flops, serve
from maskserve_harness.benchmarks.three_controls import (
    RESIDUAL_BYTES,
    EmulatedDevice,
    residual_maps,
)
from maskserve_harness.benchmarks.unet_rig import UNETS

TRANSFER = 0.9
"""Of the base's step: what a step's residuals take over the link."""
_LINK_BYTES_PER_S = 10e9 / 8
_STANDS_FOR = 64
"""Bytes of the emulated service's residuals for which one is sent, as much more slowly: copying all
of them would take cores that nobody emulates."""
_STEPS = 28
_PATIENCE_S = 30.0
_NET = "net"


class SlowConnection(Connection):
    """As `Connection`, over a link: a message comes when the bytes of its residuals have, behind
    those of the messages before it. Sending does not wait for that.

    Args:
        bytes_per_s: of the link.
        connected: to the denoiser.
    """

    def __init__(self, bytes_per_s: float, connected: socket) -> None:
        super().__init__(connected)
        self._bytes_per_s = bytes_per_s
        self._under_way: SimpleQueue[tuple[float, Answered] | None] = SimpleQueue()
        self._lost: Lost | None = None
        threading.Thread(target=self._carry, name="slow link", daemon=True).start()

    def send(self, answered: Answered) -> None:
        if self._lost is not None:
            raise self._lost
        self._under_way.put((time.monotonic(), answered))

    def close(self) -> None:
        self._under_way.put(None)
        super().close()

    def _carry(self) -> None:
        free_at = 0.0
        while (sent := self._under_way.get()) is not None:
            at, answered = sent
            nbytes = sum(_bytes(each.shape, each.dtype) for each in answered.parts)
            free_at = max(free_at, at) + nbytes / self._bytes_per_s
            time.sleep(max(0.0, free_at - time.monotonic()))
            try:
                super().send(answered)
            except Lost as error:
                self._lost = error
                return


def _bytes(shape: Sequence[int], dtype: str) -> int:
    count = getattr(torch, dtype).itemsize
    for n in shape:
        count *= n
    return int(count)


class _Emulated:
    """`control_service.Family` of a ControlNet that takes so many seconds a step."""

    facts = None

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def read(self) -> Any:
        return torch.nn.Identity()

    def control_net(self, model: Any) -> Any:
        return model

    def net_row(self, opening: Opening, nets: Mapping[str, Any]) -> None:
        """There is nothing to know of it."""

    def net_batch(self) -> _EmulatedBatch:
        return _EmulatedBatch(self.seconds)


class _EmulatedBatch:
    """As `unet.control.UnetNetBatch`, which tells all when a net has done."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._device = seconds, EmulatedDevice()
        self._added = [torch.zeros(n // _STANDS_FOR, dtype=torch.uint8) for n in RESIDUAL_BYTES]

    def run(self, rows: Sequence[NetStep[None]], send: Send) -> None:
        for each in rows:
            self._device.launch(self._seconds)
            self._device.wait()
            places = enumerate(self._added)
            send([Residual(each.name, place, place, added) for place, added in places])


class _Pace:
    """How long things take where a transfer takes `TRANSFER` of the base's step."""

    def __init__(self) -> None:
        base, net = flops()
        # What a ControlNet computes is a copy of the way down and of the middle, and products of
        # its own behind them.
        own = sum(2.0 * each.channels**2 * each.positions for each in residual_maps(UNETS[PRESET]))
        self.transfer_s = sum(RESIDUAL_BYTES) / _LINK_BYTES_PER_S
        step_s = self.transfer_s / TRANSFER
        self.net_s, self.down_s = step_s * net / base, step_s * (net - own) / base
        self.up_s = step_s - self.down_s


class _Service:
    """A process, and what begins edits whose ControlNet it runs."""

    def __init__(
        self,
        stack: ExitStack,
        pace: _Pace,
        connection: Callable[[socket], Connection],
    ) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        ours, theirs = multiprocessing.Pipe()
        spawned = multiprocessing.get_context("spawn").Process(
            target=serve,
            args=(theirs, None, folder, _Emulated(pace.net_s), connection),
            daemon=True,
        )
        spawned.start()
        theirs.close()
        stack.callback(spawned.join, 30)
        self._calls = PipeCalls(ours)
        stack.callback(self._calls.close)
        self._sessions: dict[FastControl, ControlService] = {}

    def row(self, adapters: AdapterMode, fast: FastControl) -> ServedRow:
        """Of a new edit, which the service has."""
        if fast not in self._sessions:
            session = ControlService(
                self._calls, torch.device("cpu"), "float32", _PATIENCE_S, fast=fast
            )
            session.load(_NET, _NET, _PATIENCE_S)
            self._sessions[fast] = session
        facts = OpeningFacts((OpenedControl(_NET, 1.0, 0.0, 1.0, None),), (0.0,) * _STEPS)
        row = self._sessions[fast].open(Opening(facts, {}), adapters)
        row.await_opened()
        return row


def slow_link(repeat: int) -> dict[str, Any]:
    """Edits over a free link, and over the slow one in each way, in turn.

    Args:
        repeat: edits of each; their medians are compared.
    """
    pace = _Pace()
    slow = partial(SlowConnection, _LINK_BYTES_PER_S / _STANDS_FOR)
    with ExitStack() as stack:
        free, slowed = (_Service(stack, pace, each) for each in (Connection, slow))
        ways: dict[str, tuple[_Service, AdapterMode, FastControl]] = {
            "free": (free, "exact", "ahead"),
            "exact": (slowed, "exact", "ahead"),
            "stale": (slowed, "fast", "stale"),
            "ahead": (slowed, "fast", "ahead"),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repeat):
            for name, (service, adapters, fast) in ways.items():
                row = service.row(adapters, fast)
                begin = time.perf_counter()
                _edit(row, pace)
                seconds[name].append(time.perf_counter() - begin)
                row.close()
    median = {name: statistics.median(each) for name, each in seconds.items()}
    return {
        "free_link_edit_ms": round(1e3 * median["free"], 1),
        "link_transfer_ms": round(1e3 * pace.transfer_s, 1),
        "link_transfer_of_step": TRANSFER,
        **{
            f"{name}_over_free_link": round(median[name] / median["free"], 3)
            for name in ("exact", "stale", "ahead")
        },
    }


def _edit(row: ServedRow, pace: _Pace) -> None:
    """All steps of an edit by the base, which waits where its ControlNet adds something."""
    device, batch, places = EmulatedDevice(), new_batch(), len(RESIDUAL_BYTES)
    latents = torch.zeros(1)
    for step in range(_STEPS):
        # As rows have it: before the first step's answer there is nothing to extrapolate with.
        ahead = None if step == 0 else latents
        ask_service([RowAsk(row, step, latents, 1, partial(_same, ahead))], batch)
        device.launch(pace.down_s)
        for place in reversed(range(places)):
            assert row.after(place) is not None
            device.launch(pace.up_s / places)
        device.wait()


def _same(latents: torch.Tensor | None) -> torch.Tensor | None:
    return latents
