"""Rates of this worker's device: from its properties, and a probe of under a second.

Names are not enough: cards of one name differ, and new ones appear. The cost model starts from
these rates until steps are measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from maskserve_common.config import Config, cores
from maskserve_engine.planning.cost_model import (
    PROBED_EFFICIENCY,
    GpuProperties,
    Rates,
    cpu_rates,
    gpu_rates,
)
from maskserve_engine.stages.loader import device_of, dtype_of

_SIDE = 4096
"""Side of the multiplied matrices: large enough to fill any GPU."""
_COPIED = 64 * 2**20
_SMALL = 32
"""Elements of a kernel that is shorter than the host's launch time."""
_SECONDS = 0.2
Timer = Callable[[Callable[[], object]], float]


def device_rates(config: Config) -> Rates:
    """Return the rates of the denoiser's device in the model's dtype; a GPU is probed."""
    device, dtype = device_of(config), dtype_of(config)
    peak = peak_rates(device, dtype, config.model.torch_threads)
    if device.type != "cuda":
        return peak
    return probed(peak, device, dtype, lambda work: seconds_of(work, device))


def peak_rates(
    device: torch.device,
    dtype: torch.dtype,
    threads: int = 0,
    properties: Callable[[torch.device], Any] | None = None,
) -> Rates:
    """Return the rates by a GPU's properties (None: torch's), or a CPU's threads (0: all cores)."""
    if device.type != "cuda":
        return cpu_rates(threads or cores())
    gpu_properties = (properties or torch.cuda.get_device_properties)(device)
    gpu = GpuProperties(
        name=gpu_properties.name,
        multiprocessors=gpu_properties.multi_processor_count,
        clock_hz=1e3 * gpu_properties.clock_rate,
        capability=(gpu_properties.major, gpu_properties.minor),
    )
    return gpu_rates(gpu, str(dtype).removeprefix("torch."))


def probed(
    peak: Rates,
    device: torch.device,
    dtype: torch.dtype,
    seconds: Timer,
    *,
    side: int = _SIDE,
    copied: int = _COPIED,
) -> Rates:
    """Measure the rates of a large product, of large pinned copies and of small kernels.

    Args:
        peak: rates to use where a time is 0 or less.
        device: the GPU.
        dtype: dtype of the product.
        seconds: measures one run of some work.
        side: side of the multiplied matrices.
        copied: bytes of a pinned copy.
    """
    a = torch.randn(side, side, device=device, dtype=dtype)
    out = torch.empty_like(a)
    product = seconds(lambda: torch.mm(a, a, out=out))
    host_buffer = torch.empty(copied, dtype=torch.uint8, pin_memory=device.type == "cuda")
    device_buffer = torch.empty(copied, dtype=torch.uint8, device=device)
    copy = seconds(lambda: device_buffer.copy_(host_buffer, non_blocking=True))
    small = torch.zeros(_SMALL, device=device, dtype=dtype)
    launch = seconds(lambda: small.add_(1)) if device.type == "cuda" else 0.0
    rates = peak
    if product > 0:
        flops = 2 * side**3 / product
        rates = replace(rates, product_flops=flops, step_share=PROBED_EFFICIENCY)
    if launch > 0:
        rates = replace(rates, launch=launch)
    return replace(rates, link_bytes=copied / copy) if copy > 0 else rates


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one run, averaged over some tenths of a second after a warm-up."""

    def lasts(times: int) -> float:
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for _ in range(times):
            work()
        torch.cuda.synchronize(device)
        return (time.perf_counter() - begin) / times

    lasts(1)
    run_s = max(lasts(1), 1e-6)
    return lasts(min(1000, max(1, int(_SECONDS / run_s))))
