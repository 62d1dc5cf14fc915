"""Seconds of a step on several devices, from what others than TetriServe have measured. The paper
prints no step time and no number of steps.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import Any, Final

from maskserve_benchmarks.simulator.inputs import Input
from maskserve_common.line_fit import Line
from maskserve_engine.families.sd3 import spec as sd3
from maskserve_engine.planning.degree_costs import (
    ExchangeCosts,
    calls,
    seconds_by_degree,
)
from maskserve_engine.spec.family import StepPicture
from maskserve_studies.deadlines.gangs import DUE, SIZES, GangCosts, flux_row

Times = dict[int, tuple[float, ...]]

XDIT: Final = {"compiled": (4.30, 2.68, 1.63), "eager": (6.71, 4.38, 4.24)}
"""Seconds of a FLUX.1 dev picture of 1024x1024 on 1, 2 and 4 H100 with Ulysses
(xdit-project/xDiT, docs/performance/flux.md).
"""
XDIT_STEPS: Final = 28
AROUND: Final = 0.109
"""Seconds of the prompt and of decoding: 24 ms of T5 and 85 of the VAE, measured on an H200
(docs/gpu.md).
"""
H100_TFLOPS: Final = 989.0
STEPS: Final = (20, 28, 50)


def _flux_flops(side: int) -> float:
    work, row = flux_row(side)
    return work.step_flops([row], "dense")


def fitted(seconds: tuple[float, ...]) -> GangCosts:
    """Return the costs whose law has these seconds of a picture on 1, 2, 4 … devices: exactly on
    one, on average on the others.
    """
    work, _ = flux_row(1024)
    steps = [(s - AROUND) / XDIT_STEPS for s in seconds]
    fixed = GangCosts().fixed
    tflops = _flux_flops(1024) / (steps[0] - fixed) / 1e12
    free = GangCosts(tflops, fixed, ExchangeCosts(call_seconds=0.0))
    beyond = [s - f for s, f in zip(steps[1:], free.seconds(1024)[1:], strict=False)]
    return replace(free, exchange=ExchangeCosts(call_seconds=mean(beyond) / calls(work, 2)))


PRICES: Final = {"counted": GangCosts()} | {name: fitted(s) for name, s in XDIT.items()}


def law_error(name: str) -> float:
    """Return by how much the law of degrees misses the published seconds at most."""
    law = PRICES[name].seconds(1024)
    steps = [(s - AROUND) / XDIT_STEPS for s in XDIT[name]]
    return max(
        abs(fitted_s / published_s - 1) for fitted_s, published_s in zip(law, steps, strict=False)
    )


def steps_at_peak(degree: int) -> float:
    """Return how many steps of a picture of 2048x2048 so many H100 do by its due time, if they
    reach their peak and exchange nothing.
    """
    return DUE[2048] * degree * H100_TFLOPS * 1e12 / _flux_flops(2048)


# Stable Diffusion 3 on four A40

A40_TFLOPS: Final = 149.7
A40_SHARES: Final = (0.5, 0.65)
"""Shares of the peak: of a step with xDiT's compiled times, and of one measured on an H200."""
A40_DEGREES: Final = (1, 2, 4)
SD3_MEDIUM: Final[dict[str, Any]] = {
    "num_layers": 24,
    "num_attention_heads": 24,
    "attention_head_dim": 64,
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": 2,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 2048,
}
"""transformer/config.json of stable-diffusion-3-medium-diffusers."""
SD3_TEXT: Final = 77 + 256


def sd3_times(share: float) -> Times:
    """Return the seconds of a guided step of SD3 by size and degree. Two cards have a bridge; four
    meet over PCIe.
    """
    compute = Line(GangCosts().fixed, 1e-12 / (share * A40_TFLOPS))
    call = PRICES["compiled"].exchange.call_seconds
    times = {}
    for side in SIZES:
        work = replace(sd3.count(SD3_MEDIUM, StepPicture(side // 8, side // 8)), copies=2)
        row = work.row_at(1.0, SD3_TEXT)
        times[side] = tuple(
            seconds
            for rate, degrees in ((56.25e9, A40_DEGREES[:2]), (32e9, A40_DEGREES[2:]))
            for seconds in seconds_by_degree(
                work, row, "dense", compute, ExchangeCosts(rate, call), degrees
            )
        )
    return times


def inputs() -> list[Input]:
    """Every input of the study."""
    due = ", ".join(f"{side}: {seconds:g} s" for side, seconds in DUE.items())

    tflops = ", ".join(f"{side}²: {_flux_flops(side) / 1e12:.0f}" for side in SIZES)

    def law(name: str) -> str:
        costs = PRICES[name]
        return f"{costs.tflops:.0f} TFLOP/s, {1e6 * costs.exchange.call_seconds:.0f} µs"

    published = (
        "xDiT's page on FLUX.1's performance, {} on 1, 2, 4 H100; the law misses it by {:.1%}"
    )
    return [
        Input("due times", due, "problem", "§6.1, scales 1.0 to 1.5"),
        Input("mixes", "uniform, skewed", "problem", "§6.1"),
        Input("arrivals", "12 a minute, Poisson", "problem", "§6.1; in bursts gamma gaps"),
        Input("steps of a picture", "20, 28, 50", "assumed", "not printed; run over the range"),
        Input("TFLOPs of a step", tflops, "counted", "`maskserve_engine.planning.flops`"),
        Input(
            "rate and call, *counted*",
            law("counted"),
            "measured",
            "a dense step at 1024², 119 ms: 114 to 122 on an H200 "
            "(`scripts/bench gpu_run --machine`, docs/gpu.md); the call is assumed",
        ),
        *(
            Input(
                f"rate and call, *{name}*",
                law(name),
                "published",
                published.format(", ".join(f"{s:.2f} s" for s in XDIT[name]), law_error(name)),
            )
            for name in XDIT
        ),
        Input("fixed part of a step", "5 ms", "assumed", "`maskserve_engine.planning.cost_model`"),
        Input("prompt and decoding", "24 and 85 ms", "measured", "on an H200 (docs/gpu.md)"),
        Input("link of H100", "450 GB/s each way", "published", "data sheet, NVLink 4"),
        Input("SD3", "24 blocks of width 1536, guided", "published", "transformer/config.json"),
        Input("peak of an A40", f"{A40_TFLOPS:g} TFLOP/s", "published", "data sheet, bfloat16"),
        Input("reached share of it", "0.5, 0.65", "assumed", "as H100 and H200; run over both"),
        Input("links of A40", "56, 32 GB/s each way", "published", "bridge of two, PCIe 4.0"),
    ]
