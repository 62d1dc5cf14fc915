"""Cost model of one worker: seconds of a step from its FLOPs, seconds of a load from its bytes.

FlashPS §4.4 fits a line through measured latencies against counted FLOPs; here a second line per
tier gives the loads. A fresh worker starts from public peak numbers and says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from maskserve_core.planning.flops import Floats

VERSION = 1
TIERS = ("device", "host", "disk", "remote")
"""From near to far."""
SOURCES = ("measured", "estimate")
_LEAST_SHARE = 1e-3
"""Of the longest sample: shorter ones count as if they were as long, in relative errors."""


@dataclass(frozen=True, slots=True)
class Line:
    """`seconds = fixed + per_unit * x`, both at least 0."""

    fixed: float
    """Seconds of a step or transfer however small."""
    per_unit: float
    """Seconds per FLOP or byte."""
    r2: float | None = None
    """Share of the variance the fit explains; `None` if nothing was fitted or nothing varied."""
    samples: int = 0

    def __post_init__(self) -> None:
        for name in ("fixed", "per_unit"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: {value!r} is not a finite number of at least 0")

    def seconds(self, x: float) -> float:
        """Predicted seconds for `x` FLOPs or bytes."""
        return self.fixed + self.per_unit * x


def fit(x: Sequence[float], seconds: Sequence[float]) -> Line:
    """Least squares of relative errors over lines with no negative coefficient.

    Relative, because a plan weighs the small step of a cached row by its own time: plain least
    squares would bend the line to the long steps and miss the short ones by a fifth. With two
    coefficients the constrained optimum is the free one or lies on an edge: through the origin,
    or flat. R² is of plain errors, as in the paper's Fig. 11; it may be negative: worse than the
    mean.

    Raises:
        ValueError: fewer than two samples, unequal lengths, or values that are negative or not
            finite.
    """
    xs, ys = np.asarray(x, dtype=float), np.asarray(seconds, dtype=float)
    if xs.shape != ys.shape or xs.ndim != 1 or len(xs) < 2:
        raise ValueError(
            f"samples: got {xs.shape} and {ys.shape}; accepted: two equal rows of >= 2"
        )
    if not (
        np.isfinite(xs).all() and np.isfinite(ys).all() and (xs >= 0).all() and (ys >= 0).all()
    ):
        raise ValueError("samples: values must be finite and at least 0")
    longest = float(ys.max()) or 1.0
    weight: Floats = np.maximum(ys / longest, _LEAST_SHARE) ** -2.0
    weight = weight / weight.sum()
    x_mean, y_mean = float(weight @ xs), float(weight @ ys)
    dx, dy = xs - x_mean, ys - y_mean
    spread = float(weight @ (dx * dx))
    slope = float(weight @ (dx * dy)) / spread if spread else 0.0
    power = float(weight @ (xs * xs))
    edges = [(y_mean, 0.0), (0.0, float(weight @ (xs * ys)) / (power or 1.0))]
    free = (y_mean - slope * x_mean, slope)
    lines = edges + ([free] if min(free) >= 0 else [])

    def errors(line: tuple[float, float]) -> Floats:
        return np.square(ys - line[0] - line[1] * xs)

    best = min(lines, key=lambda line: float(weight @ errors(line)))
    total = float(((ys - ys.mean()) ** 2).sum())
    r2 = 1 - float(errors(best).sum()) / total if total else None
    return Line(*best, r2=r2, samples=len(xs))


@dataclass(frozen=True, slots=True)
class CostModel:
    """What a worker publishes in its status record.

    Args:
        device: name of the device the numbers are of.
        compute: seconds of a step against its FLOPs.
        loads: seconds of one transfer against its bytes, per tier.
        source: `measured` or `estimate`.
    """

    device: str
    compute: Line
    loads: Mapping[str, Line] = field(default_factory=dict)
    source: str = "measured"

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"source: {self.source!r}; accepted: {', '.join(SOURCES)}")
        for tier in self.loads:
            if tier not in TIERS:
                raise ValueError(f"loads: no tier {tier!r}; accepted: {', '.join(TIERS)}")

    def step_seconds(self, flops: float) -> float:
        """Seconds of a step of `flops` FLOPs, loads aside."""
        return self.compute.seconds(flops)

    def load_seconds(self, tier: str, size: float) -> float:
        """Seconds of one transfer of `size` bytes from `tier`; nothing takes no time.

        Raises:
            ValueError: no numbers for the tier.
        """
        if tier not in self.loads:
            raise ValueError(f"tier: {tier!r} has no numbers; known: {', '.join(self.loads)}")
        return self.loads[tier].seconds(size) if size else 0.0

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `from_json` reads it back."""
        lines = {"compute": self.compute, **{f"load.{t}": n for t, n in self.loads.items()}}
        return {
            "version": VERSION,
            "device": self.device,
            "source": self.source,
            "lines": {
                k: {"fixed": n.fixed, "per_unit": n.per_unit, "r2": n.r2, "samples": n.samples}
                for k, n in lines.items()
            },
        }


def from_json(values: Mapping[str, Any] | str | bytes) -> CostModel:
    """Read what `CostModel.to_json` wrote, as an object or its text.

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
        return CostModel(str(raw["device"]), compute, loads, str(raw["source"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a cost model: {error!r}") from error


# --- Estimates. -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """Public peak numbers of a device; makers' data sheets, dense (no structured sparsity)."""

    key: str
    """Found in the device's name, lower case."""
    half_tflops: float
    """bfloat16 and float16 matrix peak, TFLOP/s."""
    single_tflops: float
    """float32 peak without TF32, TFLOP/s."""
    link_gbytes: float
    """Host link, peak GB/s in one direction."""


# The first key that fits wins: the longer names stand before the names they contain.
DEVICE_CLASSES = (
    DeviceClass("h200", 989, 67, 64),
    DeviceClass("h100 pcie", 756, 51, 64),
    DeviceClass("h100", 989, 67, 64),
    DeviceClass("h800", 989, 67, 64),
    DeviceClass("a100", 312, 19.5, 32),
    DeviceClass("a10g", 70, 35, 32),
    DeviceClass("a10", 125, 31.2, 32),
    DeviceClass("l40s", 362, 91.6, 32),
    DeviceClass("l4", 121, 30.3, 32),
    DeviceClass("4090", 165, 82.6, 32),
)
_CPU_TFLOPS_PER_CORE = 0.08
"""Two 256-bit multiply-adds a cycle at 2.5 GHz."""
EFFICIENCY = 0.5
"""Share of the matrix peak that a whole step reaches; within a factor of 2 either way."""
LINK_EFFICIENCY = 0.78
"""Share of the link's peak that large pinned copies reach: 50 of 64, 25 of 32 GB/s."""
_OTHER_GBYTES = {"disk": 7.0, "remote": 1.0}
"""One PCIe 4 NVMe drive; a 10 Gbit/s network."""
_STEP_SECONDS, _CPU_STEP_SECONDS, _TRANSFER_SECONDS = 5e-3, 1e-3, 3e-5


def estimate(device: str, dtype: str = "bfloat16", *, cores: int = 1) -> CostModel:
    """A rough cost model for a device nobody has measured yet, flagged `estimate`.

    Args:
        device: its name, as `torch.cuda.get_device_name` gives it; an unknown name counts as a
            CPU, the slow side to be wrong on.
        dtype: `float32` takes the single-precision peak.
        cores: CPU cores of the denoiser.
    """
    name = device.lower().replace("-", " ")
    found = next((c for c in DEVICE_CLASSES if c.key in name), None)
    # Pages of the host tier are the CPU's own memory: a copy, at about what one core moves.
    link = found.link_gbytes * LINK_EFFICIENCY if found else 10.0
    tflops = _CPU_TFLOPS_PER_CORE * cores
    if found:
        tflops = found.single_tflops if dtype == "float32" else found.half_tflops
    return CostModel(
        device=device,
        compute=Line(
            _STEP_SECONDS if found else _CPU_STEP_SECONDS, 1 / (tflops * 1e12 * EFFICIENCY)
        ),
        loads={
            "device": Line(0.0, 0.0),
            "host": Line(_TRANSFER_SECONDS if found else 0.0, 1e-9 / link),
            **{t: Line(1e-4, 1e-9 / rate) for t, rate in _OTHER_GBYTES.items()},
        },
        source="estimate",
    )
