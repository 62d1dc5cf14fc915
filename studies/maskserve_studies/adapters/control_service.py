"""Time a dense step with a ControlNet in a service, compared with the ControlNet beside the base
model.

There are two processes with one core and one thread each. One has a UNet with SDXL's stages at 0.3
of their width, random weights and one pass. The other is the service with a ControlNet of the same
stages.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from diffusers import ControlNetModel

from maskserve_benchmarks.steps.replay import refreshed_every
from maskserve_benchmarks.steps.unet_rig import TEXT, UNETS, UnetBench
from maskserve_benchmarks.timing import Timer
from maskserve_engine.base.job import ControlInput
from maskserve_engine.control_link.opening import OpenedControl, Opening, OpeningMessage
from maskserve_engine.control_link.services import ControlService, ControlServices
from maskserve_engine.families.control import NetBatch, RowControl, ServedControl
from maskserve_engine.families.unet.control import (
    UnetControlNet,
    UnetNetInput,
    UnetNetRow,
    UnetNets,
)
from maskserve_engine.families.unet.spec import control_work, unet_work
from maskserve_studies.adapters.service_process import PATIENCE_S, alone_on, service_process

PRESET = "sdxl-narrow"
NET = "net"
_PIXELS = 8
"""Pixels per latent."""


def build_net(preset: str) -> Any:
    """A ControlNet beside the preset's UNet; none of its additions is zero."""
    config = UNETS[preset]
    excluded = ("sample_size", "out_channels", "up_block_types")
    net_config = {name: value for name, value in config.items() if name not in excluded}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net = ControlNetModel(**net_config).eval().requires_grad_(False)
        for name, weight in net.named_parameters():
            if name.startswith("controlnet"):
                torch.nn.init.normal_(weight, std=0.02)
    return net


class _Unet:
    """`service_process.Family`."""

    spec = None

    def read(self) -> Any:
        return build_net(PRESET)

    def control_net(self, model: Any) -> UnetControlNet:
        return UnetControlNet.of(model, model, 4)

    def net_row(self, opening: Opening, nets: Mapping[str, Any]) -> UnetNetRow:
        return UnetNetRow.of(opening, nets)

    def net_batch(self) -> NetBatch:
        return NetBatch(UnetNets())


def service_step(repeat: int, clock: str = "wall") -> dict[str, Any]:
    """Time steps of a dense row without a ControlNet, with one beside the base model, and with one
    in a service, in turn.

    Args:
        repeat: steps of each way; their medians are compared.
        clock: the clock of `Timer`. `cpu` leaves out the time that the base waits for the service.

    Returns:
        Nothing on a machine with one core.
    """
    cores, threads = sorted(os.sched_getaffinity(0)), torch.get_num_threads()
    if len(cores) < 2:
        return {}
    bench = UnetBench(PRESET, torch.float32, torch.device("cpu"), "model")
    try:
        with service_process(_Unet(), cores[1]) as calls:
            alone_on(cores[0])
            service = ControlService(calls, bench.device, "float32", PATIENCE_S)
            services = ControlServices.of(service)
            services.load(NET, NET, NET, PATIENCE_S)
            plain_ms, in_process_ms, served_ms = _timed(
                bench, services, Timer(bench.device, clock), repeat
            )
            services.close()
    finally:
        os.sched_setaffinity(0, set(cores))
        torch.set_num_threads(threads)
    base, net = flops()
    limit = 1.0 + net / base  # the most that hiding the ControlNet can gain
    return {
        "service_step_without_ms": round(plain_ms, 1),
        "service_step_beside_ms": round(in_process_ms, 1),
        "service_step_ms": round(served_ms, 1),
        "service_speedup": round(in_process_ms / served_ms, 3),
        "service_limit": round(limit, 3),
        "service_of_limit": round(in_process_ms / served_ms / limit, 3),
    }


def _timed(bench: UnetBench, services: ControlServices, timer: Timer, repeat: int) -> list[float]:
    side, width = _PIXELS * bench.side, int(UNETS[PRESET]["cross_attention_dim"])
    with torch.inference_mode():
        texts = torch.randn(1, TEXT, width)
        pooled, sizes = torch.randn(1, 1280), torch.tensor([[512.0, 512, 0, 0, 512, 512]])
        picture = torch.rand(1, 3, side, side)
    plain, in_process_row, served_row = (bench.row(None, 0) for _ in range(3))
    control = ControlInput(NET, np.zeros((0, 0, 3), np.uint8))
    net = UnetControlNet.of(build_net(PRESET), bench.model, 4)
    with torch.inference_mode():
        net_input = UnetNetInput.encode(control, net, picture, texts, (pooled, sizes))
    plan = refreshed_every(1, bench.steps)
    in_process_row.control = RowControl((net_input,), plan)
    arrays = {"texts": texts, "micro.0": pooled, "micro.1": sizes, "picture.0": picture}
    timesteps = tuple(served_row.precomputed_timesteps)
    message = OpeningMessage((OpenedControl.of(control),), timesteps, plan)
    row = services.open(Opening(message, arrays))
    served_row.control = ServedControl.of(row, 1)
    rows = plain, in_process_row, served_row
    for bench_row in rows:
        bench.step([bench_row], "dense")
    steps = [partial(bench.step, [bench_row], "dense") for bench_row in rows]
    return timer.in_turn(steps, repeat)


def flops() -> tuple[float, float]:
    """FLOPs of a step of the base model, and FLOPs of its ControlNet."""
    config = UNETS[PRESET]
    side = int(config["sample_size"])
    work, net = (count(config, side, side, guidance=False) for count in (unet_work, control_work))
    row = work.row_at(1.0, TEXT)
    return work.step_flops([row], "dense"), net.step_flops([row], "dense")
