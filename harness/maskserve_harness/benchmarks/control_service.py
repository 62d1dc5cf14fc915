"""A dense step with a ControlNet in a service, over the same with it beside the base.

Two processes, a core and a thread each: one has a UNet of SDXL's stages at 0.3 of their width,
random weights, one pass; the other the service, its socket and slots as they are served, with a
ControlNet of those stages. KServe's calls, which no step makes, go through a pipe.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import threading
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socket
from typing import Any, Protocol

import numpy as np
import torch
from diffusers import ControlNetModel

from maskserve_core.config import Config
from maskserve_core.contracts.request import ResolvedControl
from maskserve_core.models.unet import control_work, unet_work
from maskserve_engine.adapters.control_net_loader import LoadedNet
from maskserve_engine.control_link.opening import OpenedControl, Opening, OpeningFacts
from maskserve_engine.control_link.served import ControlService
from maskserve_engine.control_link.transport import Connection as Denoiser
from maskserve_engine.control_service import ControlNetService
from maskserve_engine.families.control_batches import NetBatch
from maskserve_engine.families.unet.control import (
    PassControl,
    ServedPass,
    UnetControlNet,
    UnetNetBatch,
    UnetNetInput,
    UnetNetRow,
    UnetRowControl,
    UnetServedControl,
)
from maskserve_engine.job import ControlInput
from maskserve_harness.benchmarks.timing import Timer
from maskserve_harness.benchmarks.unet_rig import TEXT, UNETS, UnetBench

PRESET = "sdxl-narrow"
NET = "net"
_PIXELS = 8
"""Per latent."""
_PATIENCE_S = 120.0


def build_net(preset: str) -> Any:
    """A ControlNet beside the preset's UNet; nothing that it adds is zero."""
    config = UNETS[preset]
    left_out = ("sample_size", "out_channels", "up_block_types")
    own = {name: value for name, value in config.items() if name not in left_out}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net = ControlNetModel(**own).eval().requires_grad_(False)
        for name, weight in net.named_parameters():
            if name.startswith("controlnet"):
                torch.nn.init.normal_(weight, std=0.02)
    return net


class Family(Protocol):
    """What the service asks of a family (`families.adapter.Adapter`), and the ControlNets that it
    reads; made in another process.
    """

    facts: Any

    def read(self) -> Any: ...

    def control_net(self, model: Any) -> Any: ...

    def net_row(self, opening: Opening, nets: Mapping[str, Any]) -> Any: ...

    def net_batch(self) -> NetBatch[Any]: ...


class _Unet:
    facts = None

    def read(self) -> Any:
        return build_net(PRESET)

    def control_net(self, model: Any) -> UnetControlNet:
        return UnetControlNet.of(model, model, 4)

    def net_row(self, opening: Opening, nets: Mapping[str, Any]) -> UnetNetRow:
        return UnetNetRow.of(opening, nets)

    def net_batch(self) -> UnetNetBatch:
        return UnetNetBatch()


class _Loader:
    """Makes the ControlNet in place of reading it (`ControlNetLoader`)."""

    def __init__(self, family: Family, config: Config, facts: object, bring: Any) -> None:
        self._family, self._bring = family, bring

    def device_bytes(self, control: ResolvedControl) -> int:
        return 0

    def load(self, control: ResolvedControl, done: Any) -> None:
        def load() -> None:
            self._bring(control.version, self._family)
            done(LoadedNet(control.name, "", 0.0))

        threading.Thread(target=load).start()

    def close(self) -> None:
        """It has nothing open."""


def serve(
    pipe: Connection,
    core: int | None,
    folder: str,
    family: Family,
    connection: Callable[[socket], Denoiser] = Denoiser,
) -> None:
    """A service's process, until the pipe closes.

    Args:
        pipe: of `PipeCalls`.
        core: that it has for itself; None: any.
        folder: of its slots.
        family: of its ControlNets.
        connection: of a denoiser.
    """
    if core is not None:
        _alone_on(core)
    loader: Any = partial(_Loader, family)
    adapter: Any = family
    service = ControlNetService(Config(), Path(folder), loader, adapter, connection)
    while True:
        try:
            op, arrays = pipe.recv()
        except (EOFError, ConnectionResetError):
            break
        said: dict[str, Any] = {}
        match op.pop("op"):
            case "attach":
                said = service.attach(**op)
            case "load":
                done = threading.Event()
                control = ResolvedControl(name=op["name"], version=op["version"])
                service.load(op["session"], control, partial(_set, done))
                done.wait()
                said = {"digest": ""}
            case "open":
                opening = Opening.unpacked(op["opening"], arrays)
                service.open(op["session"], op["row"], opening)
            case "close":
                service.close_row(op["session"], op["row"])
        pipe.send(said)
    service.close()


def _set(event: threading.Event, outcome: object) -> None:
    event.set()


class PipeCalls:
    """`ServiceCalls` through a pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._door = pipe, threading.Lock()

    def call(self, op: dict[str, Any], arrays: bytes, limit_s: float) -> dict[str, Any]:
        with self._door:
            self._pipe.send((op, arrays))
            found: dict[str, Any] = self._pipe.recv()
            return found

    def close(self) -> None:
        self._pipe.close()


def _alone_on(core: int) -> None:
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)


def service_step(repeat: int, clock: str = "wall") -> dict[str, Any]:
    """Steps of a dense row without a ControlNet, with one beside the base, and with one in a
    service, in turn.

    Args:
        repeat: steps of each; medians are compared.
        clock: as of `Timer`; `cpu` leaves out what the base waits, and the service.

    Returns:
        nothing where there is one core.
    """
    cores, threads = sorted(os.sched_getaffinity(0)), torch.get_num_threads()
    if len(cores) < 2:
        return {}
    bench = UnetBench(PRESET, torch.float32, torch.device("cpu"), "model")
    ours, theirs = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        spawned = multiprocessing.get_context("spawn").Process(
            target=serve, args=(theirs, cores[1], folder, _Unet()), daemon=True
        )
        spawned.start()
        theirs.close()
        try:
            _alone_on(cores[0])
            service = ControlService(PipeCalls(ours), bench.device, "float32", _PATIENCE_S)
            service.load(NET, NET, _PATIENCE_S)
            times = _timed(bench, service, Timer(bench.device, clock), repeat)
            service.close()
        finally:
            os.sched_setaffinity(0, set(cores))
            torch.set_num_threads(threads)
            spawned.join(30)
    without, beside, served = times
    base, net = flops()
    limit = 1.0 + net / base  # what hiding the ControlNet can give
    return {
        "service_step_without_ms": round(without, 1),
        "service_step_beside_ms": round(beside, 1),
        "service_step_ms": round(served, 1),
        "service_speedup": round(beside / served, 3),
        "service_limit": round(limit, 3),
        "service_of_limit": round(beside / served / limit, 3),
    }


def _timed(bench: UnetBench, service: ControlService, timer: Timer, repeat: int) -> list[float]:
    side, width = _PIXELS * bench.side, int(UNETS[PRESET]["cross_attention_dim"])
    with torch.inference_mode():
        texts = torch.randn(1, TEXT, width)
        pooled, sizes = torch.randn(1, 1280), torch.tensor([[512.0, 512, 0, 0, 512, 512]])
        picture = torch.rand(1, 3, side, side)
    plain, beside, served = (bench.row(None, 0) for _ in range(3))
    control = ControlInput(NET, np.zeros((0, 0, 3), np.uint8))
    net = UnetControlNet.of(build_net(PRESET), bench.model, 4)
    with torch.inference_mode():
        given = UnetNetInput.made(control, net, picture, texts, (pooled, sizes))
    beside.control = UnetRowControl((given,), (PassControl(),))
    arrays = {"texts": texts, "micro.0": pooled, "micro.1": sizes, "picture.0": picture}
    facts = OpeningFacts((OpenedControl.of(control),), tuple(served.timesteps_ahead))
    row = service.open(Opening(facts, arrays))
    served.control = UnetServedControl(row, (ServedPass(row, 0),))
    rows = plain, beside, served
    for each in rows:
        bench.step([each], "dense")
    steps = [partial(bench.step, [each], "dense") for each in rows]
    found = [[timer.ms(step) for step in steps] for _ in range(repeat)]
    return [statistics.median(each) for each in zip(*found, strict=True)]


def flops() -> tuple[float, float]:
    """Of a step of the base, and of its ControlNet."""
    config = UNETS[PRESET]
    side = int(config["sample_size"])
    work, net = (count(config, side, side, guidance=False) for count in (unet_work, control_work))
    row = work.row_at(1.0, TEXT)
    return work.step_flops([row], "dense"), net.step_flops([row], "dense")
