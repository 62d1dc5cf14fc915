"""Cost model of one worker: seconds of a step from its FLOPs, seconds of a load from its bytes.

FlashPS §4.4 fits a line through measured latencies against counted FLOPs; here a second line per
tier gives the loads. A fresh worker starts from public peak numbers and says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from maskserve_common.contracts.tiers import TIERS
from maskserve_common.line_fit import Line

VERSION = 1
SOURCES = ("measured", "estimate")


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs that a worker publishes in its status record.

    Args:
        device: name of the device.
        compute: seconds of a step by its FLOPs.
        loads: seconds of one transfer by its bytes, per tier.
        source: `measured` or `estimate`.
        launch: host seconds per kernel: a step takes at least as long as launching its kernels. 0
            where the device is the host.
    """

    device: str
    compute: Line
    loads: Mapping[str, Line] = field(default_factory=dict)
    source: str = "measured"
    launch: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.launch) and self.launch >= 0):
            raise ValueError(f"launch: {self.launch!r} is not a finite number of at least 0")
        if self.source not in SOURCES:
            raise ValueError(f"source: {self.source!r}; accepted: {', '.join(SOURCES)}")
        for tier in self.loads:
            if tier not in TIERS:
                raise ValueError(f"loads: no tier {tier!r}; accepted: {', '.join(TIERS)}")

    def step_seconds(self, flops: float) -> float:
        """Return the seconds of a step of `flops` FLOPs, without loads."""
        return self.compute.seconds(flops)

    def load_seconds(self, tier: str, size: float) -> float:
        """Return the seconds of one transfer of `size` bytes from `tier`; 0 for 0 bytes.

        Raises:
            ValueError: no numbers for the tier.
        """
        if tier not in self.loads:
            raise ValueError(f"tier: {tier!r} has no numbers; known: {', '.join(self.loads)}")
        return self.loads[tier].seconds(size) if size else 0.0

    def to_json(self) -> dict[str, Any]:
        lines = {"compute": self.compute, **{f"load.{t}": n for t, n in self.loads.items()}}
        return {
            "version": VERSION,
            "device": self.device,
            "source": self.source,
            "launch": self.launch,
            "lines": {
                k: {"fixed": n.fixed, "per_unit": n.per_unit, "r2": n.r2, "samples": n.samples}
                for k, n in lines.items()
            },
        }


def from_json(values: Mapping[str, Any] | str | bytes) -> CostModel:
    """Read the result of `CostModel.to_json`, as an object or its text.

    Raises:
        ValueError: another version, or not a cost model.
    """
    try:
        raw = json.loads(values) if isinstance(values, str | bytes) else values
        if raw["version"] != VERSION:
            raise ValueError(f"version: {raw['version']!r}; accepted: {VERSION}")
        lines = {key: Line(**line) for key, line in raw["lines"].items()}
        compute = lines.pop("compute")
        loads = {key.removeprefix("load."): line for key, line in lines.items()}
        launch = float(raw.get("launch", 0.0))  # missing in files of older workers
        return CostModel(str(raw["device"]), compute, loads, str(raw["source"]), launch)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a cost model: {error!r}") from error


# --- Estimates. -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rates:
    """Peak rates of a device, published or probed; estimates start from them."""

    device: str
    product_flops: float
    """FLOP/s of matrix products in the model's dtype."""
    link_bytes: float
    """Bytes/s of large pinned copies from the host's memory."""
    step_share: float
    """Share of `product_flops` that a whole step reaches."""
    step_fixed: float = 5e-3
    """Seconds that every step takes beside its FLOPs."""
    transfer_fixed: float = 3e-5
    """Seconds that every copy takes beside its bytes."""
    launch: float = 0.0
    """Host seconds per kernel."""


@dataclass(frozen=True, slots=True)
class GpuProperties:
    name: str
    multiprocessors: int
    clock_hz: float
    """Highest clock."""
    capability: tuple[int, int]


# Compute capability from which on: FLOPs per multiprocessor and cycle of 16-bit products summed in
# float32 (matrix units), of float32 ones (without TF32), and the host link's GB/s.
_ARCHITECTURES = (
    ((12, 0), 1024, 256, 64),
    ((10, 0), 8192, 256, 64),
    ((9, 0), 4096, 256, 64),
    ((8, 6), 1024, 256, 32),
    ((8, 0), 2048, 128, 32),
    ((7, 0), 1024, 128, 16),
    ((0, 0), 256, 256, 16),
)
EFFICIENCY = 0.5
"""Share of the matrix peak that a whole step reaches; within a factor of 2 up or down."""
PROBED_EFFICIENCY = 0.67
"""Share of a large product's measured rate, which itself is some 3/4 of the peak."""
LINK_EFFICIENCY = 0.78
"""Share of the link's peak that large pinned copies reach: 50 of 64, 25 of 32 GB/s."""
_CPU_FLOPS_PER_CORE = 0.08e12
"""Two 256-bit multiply-adds a cycle at 2.5 GHz."""
_LAUNCH = 6e-6
"""Seconds that Python, torch and the driver take to launch a kernel, about."""
_CPU_COPY = 10e9
"""Pages of the host tier are the CPU's own memory: a copy, at about what one core moves."""

H100 = Rates("H100", 989e12, 64e9 * LINK_EFFICIENCY, EFFICIENCY)
"""SXM, bfloat16, by its data sheet: the default of simulations. Launches are left out."""


def gpu_rates(gpu: GpuProperties, dtype: str = "bfloat16") -> Rates:
    """Return a GPU's peak rates from its properties. Makers halve the matrix rate of some cards
    (GeForce from 8.6 on), cap others (H20) and give some fewer lanes to the host, which only a
    probe measures (`maskserve_engine.stages.device_probe`).

    Args:
        gpu: its properties.
        dtype: `float32` takes the single-precision peak.
    """
    of_generation = (row[1:] for row in _ARCHITECTURES if gpu.capability >= row[0])
    half, single, link = next(of_generation)
    per_cycle = single if dtype == "float32" else half
    flops = gpu.multiprocessors * gpu.clock_hz * per_cycle
    return Rates(gpu.name, flops, 1e9 * link * LINK_EFFICIENCY, EFFICIENCY, launch=_LAUNCH)


def cpu_rates(cores: int = 1) -> Rates:
    """Return the rates of `cores` CPU cores, in float32."""
    return Rates("cpu", _CPU_FLOPS_PER_CORE * cores, _CPU_COPY, EFFICIENCY, 1e-3, 0.0)


def estimate(rates: Rates) -> CostModel:
    """Return a rough cost model for a device on which no step has been measured, flagged
    `estimate`.
    """
    return CostModel(
        device=rates.device,
        compute=Line(rates.step_fixed, 1 / (rates.product_flops * rates.step_share)),
        loads={
            tier.name: Line(rates.transfer_fixed, 1 / rates.link_bytes)
            if tier.gbytes is None
            else Line(tier.wait, 1e-9 / tier.gbytes)
            for tier in TIERS.values()
        },
        source="estimate",
        launch=rates.launch,
    )
