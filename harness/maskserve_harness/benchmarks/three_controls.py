"""A dense step with three ControlNets, each in a service on a device of its own (Katz §5, Fig.
16), where the devices are emulated: a clock in place of each.

The base is this process; each service is a process with the engine's own step loop, socket and
slots. What a device computes takes as long as its FLOPs say: those of SDXL at 0.3 of its width, as
in `control_service`, at the pace at which one ControlNet's step takes an H800 what Katz measured.
As on a GPU, who launches does not wait: only for what another process says, and for the end of a
step. Beside it stand all ControlNets on the base's device, one after the other; one service that
has all three; and three whose residuals, as large as SDXL's of 1024 pixels with guidance, go
through host memory.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch

from maskserve_engine.control_link.opening import OpenedControl, Opening, OpeningFacts
from maskserve_engine.control_link.served import (
    ControlService,
    RowAsk,
    ServedRow,
    ask_service,
    new_batch,
)
from maskserve_engine.families.control_batches import NetStep, Residual, Send
from maskserve_harness.benchmarks.control_service import PRESET, PipeCalls, flops, serve
from maskserve_harness.benchmarks.unet_rig import UNETS
from maskserve_harness.published_models import SDXL

NETS = 3
_NET_S = 1.6 / 50
"""Of a ControlNet's step of SDXL: one makes 50 steps 1.6 s longer on an H800 (Katz §1)."""
_BUS_BYTES_PER_S = 25e9
"""PCIe 4.0 with 16 lanes, as it is reached."""
_STEPS = 10
_PATIENCE_S = 30.0


class EmulatedDevice:
    """Computes one thing after the other, each for as long as it is told."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def launch(self, seconds: float) -> None:
        self._free_at = max(self._free_at, time.perf_counter()) + seconds

    def wait(self) -> None:
        """Until all is done."""
        time.sleep(max(0.0, self._free_at - time.perf_counter()))


class ResidualMap(NamedTuple):
    """A feature map of a UNet that a ControlNet adds to."""

    channels: int
    positions: int


def residual_maps(config: Mapping[str, Any]) -> list[ResidualMap]:
    """In the order in which they begin."""
    channels, layers = config["block_out_channels"], int(config["layers_per_block"])
    side = int(config["sample_size"])
    maps = [ResidualMap(channels[0], side**2)]
    for level, own in enumerate(channels):
        maps += [ResidualMap(own, side**2)] * layers
        if level < len(channels) - 1:
            side //= 2
            maps.append(ResidualMap(own, side**2))
    return [*maps, maps[-1]]


_PLACES = len(residual_maps(SDXL))
RESIDUAL_BYTES = [2 * 2 * each.channels * each.positions for each in residual_maps(SDXL)]
"""Of each residual: half precision, two passes."""


class _Emulated:
    """`control_service.Family` of ControlNets that take `_NET_S`.

    Args:
        bus: whether residuals cross one on their way to host memory.
    """

    facts = None

    def __init__(self, *, bus: bool) -> None:
        self._bus = bus

    def read(self) -> Any:
        return torch.nn.Identity()

    def control_net(self, model: Any) -> Any:
        return model

    def net_row(self, opening: Opening, nets: Mapping[str, Any]) -> int:
        return len(nets)

    def net_batch(self) -> _EmulatedBatch:
        return _EmulatedBatch(self._bus)


class _EmulatedBatch:
    """As `unet.control.UnetNetBatch`, which tells all when a net has done."""

    def __init__(self, bus: bool) -> None:
        self._bus, self._device = bus, EmulatedDevice()

    def run(self, rows: Sequence[NetStep[int]], send: Send) -> None:
        for each in rows:
            self._device.launch(each.row * _NET_S)
            if self._bus:
                self._device.launch(sum(RESIDUAL_BYTES) / _BUS_BYTES_PER_S)
            self._device.wait()
            added = torch.zeros(1)
            send([Residual(each.name, place, place, added) for place in range(_PLACES)])


class _Base:
    """Steps of the base, on a device of its own."""

    def __init__(self) -> None:
        self._device = EmulatedDevice()
        base, net = flops()
        # What a ControlNet computes is a copy of the way down and of the middle, and products of
        # its own behind them.
        own = sum(2.0 * each.channels**2 * each.positions for each in residual_maps(UNETS[PRESET]))
        self._down_s = _NET_S * (net - own) / net
        self._up_s = _NET_S * base / net - self._down_s
        self.limit = 1.0 + NETS * net / base

    def alone(self) -> None:
        """All ControlNets, then the base."""
        self._device.launch(NETS * _NET_S + self._down_s + self._up_s)
        self._device.wait()

    def served(self, rows: Sequence[ServedRow], batch: int, step: int, *, bus: bool) -> None:
        """ControlNets meanwhile: it waits for them where they add something."""
        ask_service([RowAsk(row, step, torch.zeros(1)) for row in rows], batch)
        self._device.launch(self._down_s)
        for place in reversed(range(_PLACES)):
            for row in rows:
                assert row.after(place) is not None
                if bus:
                    self._device.launch(RESIDUAL_BYTES[place] / _BUS_BYTES_PER_S)
            self._device.launch(self._up_s / _PLACES)
        self._device.wait()


class _Services:
    """Processes of so many services, and the base's session with each."""

    def __init__(self, count: int, *, bus: bool = False) -> None:
        self._stack, self.bus = ExitStack(), bus
        context = multiprocessing.get_context("spawn")
        pipes = []
        for _ in range(count):
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
            ours, theirs = multiprocessing.Pipe()
            given = theirs, None, folder, _Emulated(bus=bus)
            spawned = context.Process(target=serve, args=given, daemon=True)
            spawned.start()
            theirs.close()
            self._stack.callback(spawned.join, 30)
            pipes.append(ours)
        self.sessions = []
        for pipe in pipes:
            calls = PipeCalls(pipe)
            session = ControlService(calls, torch.device("cpu"), "float32", _PATIENCE_S)
            self._stack.callback(session.close)
            self.sessions.append(session)

    def rows(self) -> list[ServedRow]:
        """An edit's, at each service with its share of the ControlNets."""
        each = NETS // len(self.sessions)
        found = []
        for session in self.sessions:
            names = [f"net-{number}" for number in range(each)]
            for name in names:
                session.load(name, name, _PATIENCE_S)
            controls = tuple([OpenedControl(name, 1.0, 0.0, 1.0, None) for name in names])
            found.append(session.open(Opening(OpeningFacts(controls, (0.0,) * _STEPS), {})))
        return found

    def close(self) -> None:
        self._stack.close()


def three_controls(repeat: int) -> dict[str, Any]:
    """Steps with all ControlNets on the base's device, in one service, and in three, in turn.

    Args:
        repeat: edits of each; the medians of their steps are compared.
    """
    base = _Base()
    with ExitStack() as stack:
        made = {
            "one_service": _Services(1),
            "": _Services(NETS),
            "bus": _Services(NETS, bus=True),
        }
        for services in made.values():
            stack.callback(services.close)
        times: dict[str, list[float]] = {}
        for _ in range(repeat):
            times.setdefault("alone", []).extend(_timed([base.alone] * _STEPS))
            for name, services in made.items():
                rows, batch = services.rows(), new_batch()
                run = partial(base.served, rows, batch, bus=services.bus)
                steps = [partial(run, step=step) for step in range(_STEPS)]
                times.setdefault(name, []).extend(_timed(steps))
                for row in rows:
                    row.close()
    ms = {name: 1e3 * statistics.median(each) for name, each in times.items()}
    speedup = ms["alone"] / ms[""]
    return {
        "three_controls_alone_ms": round(ms["alone"], 1),
        "three_controls_one_service_ms": round(ms["one_service"], 1),
        "three_controls_ms": round(ms[""], 1),
        "three_controls_bus_ms": round(ms["bus"], 1),
        "three_controls_speedup": round(speedup, 3),
        "three_controls_limit": round(base.limit, 3),
        "three_controls_of_limit": round(speedup / base.limit, 3),
        "three_controls_bus_of_limit": round(ms["alone"] / ms["bus"] / base.limit, 3),
    }


def _timed(steps: Sequence[Callable[[], None]]) -> list[float]:
    """Seconds of each; the first one, which waits for the rows to be open, is left out."""
    found = []
    for step in steps:
        begin = time.perf_counter()
        step()
        found.append(time.perf_counter() - begin)
    return found[1:]
