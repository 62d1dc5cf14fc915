"""Edits with ControlNets in services, with a clock in place of each device and network (Katz §5,
§9).

The base is this process. Each service is a process with the engine's own step loop, socket and
slots. A device's computation takes the time of its FLOPs: those of SDXL at 0.3 of its width, as in
`control_service`. As on a GPU, a process does not wait after a launch. It waits only for other
processes' messages and for the end of a step. Residuals have the shapes of SDXL's at 1024 pixels
with guidance.

`three_controls`: dense steps with three ControlNets, each in a service on its own device (Fig. 16).
The pace is that of one ControlNet's step on an H800 as Katz measured it. All nets on the base's
device, one after the other, are compared with one service that runs all three, with three services
beside each other, whose residuals lie on the base's device or go through host memory, and with one
ControlNet in one service or in three.

`slow_link`: edits with a ControlNet in a service behind 10 Gbit/s, over the same edits without a
network. The service's own process sends each message when the link would have carried it, byte by
byte (`SlowConnection`). The base computes at a pace at which a transfer takes `TRANSFER` of its
step. All steps of an edit are timed, with the first one, which nothing can hide. The modes are
`adapters: exact`, which waits at each step, and `adapters: fast`.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue
from socket import socket
from typing import Any, NamedTuple

import torch

from maskserve_benchmarks.published_models import SDXL
from maskserve_benchmarks.steps.replay import refreshed_every
from maskserve_benchmarks.steps.unet_rig import UNETS
from maskserve_common.contracts.settings import AdapterMode
from maskserve_engine.control_link.opening import OpenedControl, Opening, OpeningMessage
from maskserve_engine.control_link.served import (
    RowRequest,
    ServedRow,
    new_batch,
    request_residuals,
)
from maskserve_engine.control_link.services import ControlService, ControlServices
from maskserve_engine.control_link.transport import Answered, Connection, Lost
from maskserve_engine.families.control import NetStep, Residual, Send
from maskserve_studies.adapters.control_service import PRESET, flops
from maskserve_studies.adapters.service_process import PipeCalls, service_process

NETS = 3
_NET_S = 1.6 / 50
"""Seconds of one step of an SDXL ControlNet: Katz §1 has 50 steps take 1.6 s longer on an H800 with
a ControlNet.
"""
_BUS_BYTES_PER_S = 25e9
"""Bytes per second that PCIe 4.0 with 16 lanes reaches in practice."""
TRANSFER = 0.9
"""Time of a step's residuals on the slow link, as a share of the base model's step."""
_LINK_BYTES_PER_S = 10e9 / 8
_BYTES_PER_SENT = 64
"""Bytes of residuals for each byte that a link really sends. The link is slower by the same factor.
Copying all bytes would take cores that nobody emulates.
"""
_DENSE_STEPS, _EDIT_STEPS = 10, 28
_PATIENCE_S = 30.0


class EmulatedDevice:
    """Computes one thing after the other, for the times that it is given."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def launch(self, seconds: float) -> None:
        self._free_at = max(self._free_at, time.perf_counter()) + seconds

    def wait(self) -> None:
        """Wait until all work is done."""
        time.sleep(max(0.0, self._free_at - time.perf_counter()))


class ResidualMap(NamedTuple):
    """A feature map of a UNet that a ControlNet adds to."""

    channels: int
    positions: int


def residual_maps(config: Mapping[str, Any]) -> list[ResidualMap]:
    """The maps in the order in which they begin."""
    channels, layers = config["block_out_channels"], int(config["layers_per_block"])
    side = int(config["sample_size"])
    maps = [ResidualMap(channels[0], side**2)]
    for level, width in enumerate(channels):
        maps += [ResidualMap(width, side**2)] * layers
        if level < len(channels) - 1:
            side //= 2
            maps.append(ResidualMap(width, side**2))
    return [*maps, maps[-1]]


_PLACES = len(residual_maps(SDXL))
RESIDUAL_BYTES = [
    2 * 2 * residual_map.channels * residual_map.positions for residual_map in residual_maps(SDXL)
]
"""Bytes of each residual: half precision, two passes."""


class Nets:
    """`service_process.Family` for ControlNets whose computing time is emulated.

    Args:
        seconds: of a step of one ControlNet.
        sent_s: time in which a row's residuals reach host memory.
        sizes: bytes of the stand-ins that are sent for the residuals.
    """

    spec = None

    def __init__(self, seconds: float, sent_s: float, sizes: Sequence[int]) -> None:
        self.seconds, self.sent_s, self.sizes = seconds, sent_s, sizes

    def read(self) -> Any:
        return torch.nn.Identity()

    def control_net(self, model: Any) -> Any:
        return model

    def net_row(self, opening: Opening, nets: Mapping[str, Any]) -> Any:
        return len(nets)

    def net_batch(self) -> _NetBatch:
        return _NetBatch(self)


class _NetBatch:
    """Stands for `families.control.NetBatch` of a UNet, which reports all residuals when a net is
    done.
    """

    def __init__(self, nets: Nets) -> None:
        self._nets, self._device = nets, EmulatedDevice()
        self._added = [torch.zeros(n, dtype=torch.uint8) for n in nets.sizes]

    def run(self, rows: Sequence[NetStep], send: Send) -> None:
        for number, net_step in enumerate(rows):
            self._device.launch(net_step.row * self._nets.seconds + self._nets.sent_s)
            self._device.wait()
            places = enumerate(self._added)
            send([Residual(number, place, place, added) for place, added in places])


class Base:
    """Steps of the base model, on its own device.

    Args:
        step_s: seconds of a step without ControlNets.
    """

    def __init__(self, step_s: float) -> None:
        base, net = flops()
        # A ControlNet computes a copy of the way down and of the middle, and then its own
        # products.
        projection_flops = sum(
            2.0 * residual_map.channels**2 * residual_map.positions
            for residual_map in residual_maps(UNETS[PRESET])
        )
        self.of_net = net / base
        self.step_s, self.net_s = step_s, step_s * self.of_net
        self._down_s = step_s * (net - projection_flops) / base
        self._device = EmulatedDevice()

    def take_after_nets(self, nets: int) -> None:
        """Take a step after this many ControlNets on the same device."""
        self._device.launch(nets * self.net_s + self.step_s)
        self._device.wait()

    def take_with_services(
        self, request: RowRequest, batch: int, bytes_per_s: float | None = None
    ) -> None:
        """Take a step that waits for ControlNets where their residuals are added.

        Args:
            request: the row's request to its services.
            batch: the number of the batch.
            bytes_per_s: speed at which residuals come from host memory; None: they are on the
                device.
        """
        request_residuals([request], batch)
        self._device.launch(self._down_s)
        for place in reversed(range(_PLACES)):
            assert request.row.after(place) is not None
            if bytes_per_s is not None:
                sent_bytes = len(request.row.link_rows) * RESIDUAL_BYTES[place]
                self._device.launch(sent_bytes / bytes_per_s)
            self._device.launch((self.step_s - self._down_s) / _PLACES)
        self._device.wait()


def _services(calls: Sequence[PipeCalls], nets: Sequence[str]) -> ControlServices:
    """A denoiser's sessions with services that have loaded these ControlNets between them."""
    device = torch.device("cpu")
    services = ControlServices.of(
        *(
            ControlService(call, device, "float32", _PATIENCE_S, address=str(number))
            for number, call in enumerate(calls)
        )
    )
    for name in nets:
        services.load(name, name, name, _PATIENCE_S)
    return services


def _row(
    services: ControlServices, nets: Sequence[str], steps: int, adapters: AdapterMode = "exact"
) -> ServedRow:
    """The row of a new edit with these ControlNets, which the services have loaded."""
    controls = tuple([OpenedControl(name, 1.0, 0.0, 1.0, None) for name in nets])
    row = services.open(
        Opening(OpeningMessage(controls, (0.0,) * steps, refreshed_every(1, steps)), {}), adapters
    )
    for link_row in row.link_rows:
        link_row.await_opened()
    return row


class _Variant(NamedTuple):
    """Services, the ControlNets of an edit, and how its residuals reach the base."""

    services: ControlServices
    nets: Sequence[str]
    bytes_per_s: float | None
    """Speed at which residuals come from host memory; None: they are on the device."""


def three_controls(repeat: int) -> dict[str, Any]:
    """Steps with all ControlNets on the base's device, in one service, and in three, and steps with
    one ControlNet in a service, in turn.

    Args:
        repeat: edits of each; the medians of their steps are compared.
    """
    base = Base(_NET_S * flops()[0] / flops()[1])
    names = [f"net-{number}" for number in range(NETS)]
    bus_s = sum(RESIDUAL_BYTES) / _BUS_BYTES_PER_S
    with ExitStack() as stack:

        def started(sent_s: float, services: int, nets: Sequence[str]) -> ControlServices:
            family = Nets(_NET_S, sent_s, [1] * _PLACES)
            calls = [stack.enter_context(service_process(family)) for _ in range(services)]
            return _services(calls, nets)

        alone, one = started(0.0, 1, names[:1]), started(0.0, 1, names)
        three, three_bus = started(0.0, NETS, names), started(bus_s, NETS, names)
        alone_bus = started(bus_s, 1, names[:1])
        variants = {
            "one_control": _Variant(alone, names[:1], None),
            "one_control_three_services": _Variant(three, names[:1], None),
            "one_control_bus": _Variant(alone_bus, names[:1], _BUS_BYTES_PER_S),
            "three_controls_one_service": _Variant(one, names, None),
            "three_controls": _Variant(three, names, None),
            "three_controls_bus": _Variant(three_bus, names, _BUS_BYTES_PER_S),
        }
        times: dict[str, list[float]] = {name: [] for name in ("three_controls_alone", *variants)}
        for _ in range(repeat):
            times["three_controls_alone"] += _timed(
                [partial(base.take_after_nets, NETS)] * _DENSE_STEPS
            )
            for name, variant in variants.items():
                row = _row(variant.services, variant.nets, _DENSE_STEPS)
                step = partial(_dense_step, base, row, new_batch(), variant.bytes_per_s)
                times[name] += _timed([partial(step, n) for n in range(_DENSE_STEPS)])
                row.close()
        for services in (alone, one, three, three_bus, alone_bus):
            services.close()
    ms = {name: 1e3 * statistics.median(items) for name, items in times.items()}
    before, limit = ms["three_controls_alone"], 1.0 + NETS * base.of_net
    speedup = before / ms["three_controls"]
    return {
        **{f"{name}_ms": round(value, 1) for name, value in ms.items()},
        "three_controls_over_one": round(ms["three_controls"] / ms["one_control"], 3),
        "three_controls_bus_over_one": round(ms["three_controls_bus"] / ms["one_control_bus"], 3),
        "three_controls_speedup": round(speedup, 3),
        "three_controls_limit": round(limit, 3),
        "three_controls_of_limit": round(speedup / limit, 3),
        "three_controls_bus_of_limit": round(before / ms["three_controls_bus"] / limit, 3),
    }


def _dense_step(
    base: Base, row: ServedRow, batch: int, bytes_per_s: float | None, number: int
) -> None:
    base.take_with_services(RowRequest(row, number, torch.zeros(1)), batch, bytes_per_s)


def _timed(steps: Sequence[Callable[[], None]]) -> list[float]:
    """Seconds of each step. The first step begins an edit and is left out."""
    seconds = []
    for step in steps:
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


class SlowConnection(Connection):
    """A `Connection` over an emulated link. A message arrives when the link has carried the bytes
    of its residuals, after those of earlier messages. Sending does not wait for that.

    Args:
        bytes_per_s: speed of the link.
        connected: the connection to the denoiser.
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
        while (packet := self._under_way.get()) is not None:
            at, answered = packet
            nbytes = sum(_bytes(part.shape, part.dtype) for part in answered.parts)
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


def slow_link(repeat: int) -> dict[str, Any]:
    """Edits over a free link, over the slow link with each mode, and with three ControlNets over a
    slow link each, in turn.

    Args:
        repeat: edits of each way; their medians are compared.
    """
    transfer_s = sum(RESIDUAL_BYTES) / _LINK_BYTES_PER_S
    base, names = Base(transfer_s / TRANSFER), [f"net-{number}" for number in range(NETS)]
    nets = Nets(base.net_s, 0.0, [n // _BYTES_PER_SENT for n in RESIDUAL_BYTES])
    slow_connection = partial(SlowConnection, _LINK_BYTES_PER_S / _BYTES_PER_SENT)
    with ExitStack() as stack:
        connections: list[Callable[[socket], Connection]] = [Connection]
        connections += [slow_connection] * (1 + NETS)
        free_calls, slow_calls, *other_calls = (
            stack.enter_context(service_process(nets, connection=item)) for item in connections
        )
        free, slow = _services([free_calls], names[:1]), _services([slow_calls], names[:1])
        variants: dict[str, tuple[ControlServices, Sequence[str], AdapterMode]] = {
            "free": (free, names[:1], "exact"),
            "exact": (slow, names[:1], "exact"),
            "ahead": (slow, names[:1], "fast"),
            "three": (_services(other_calls, names), names, "exact"),
        }
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(repeat):
            for name, (services, controls, adapters) in variants.items():
                row = _row(services, controls, _EDIT_STEPS, adapters)
                begin = time.perf_counter()
                _edit(base, row)
                seconds[name].append(time.perf_counter() - begin)
                row.close()
    median = {name: statistics.median(item) for name, item in seconds.items()}
    return {
        "free_link_edit_ms": round(1e3 * median["free"], 1),
        "link_transfer_ms": round(1e3 * transfer_s, 1),
        "link_transfer_of_step": TRANSFER,
        "three_links_over_one": round(median["three"] / median["exact"], 3),
        **{
            f"{name}_over_free_link": round(median[name] / median["free"], 3)
            for name in ("exact", "ahead")
        },
    }


def _edit(base: Base, row: ServedRow) -> None:
    """Take all steps of an edit; the base waits where its ControlNet adds residuals."""
    batch, latents = new_batch(), torch.zeros(1)
    for step in range(_EDIT_STEPS):
        # As in real rows: nothing can be extrapolated before the first step's answer.
        guess = None if step == 0 else latents
        base.take_with_services(RowRequest(row, step, latents, 1, partial(_same, guess)), batch)


def _same(latents: torch.Tensor | None) -> torch.Tensor | None:
    return latents
