"""The inputs of the simulated workflows, and the rates over a range of those that the paper
measured with its own system: the speed of two devices and the time of a load.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from maskserve_benchmarks.reports import table
from maskserve_benchmarks.simulator.inputs import Input, inputs_table
from maskserve_studies.workflow_plans.figures import PER_DEVICE, rates
from maskserve_studies.workflow_plans.systems import (
    BASES,
    DEVICES,
    LOAD_S,
    OVERHEAD_S,
    ROOM,
    SETTINGS,
    SHARES,
    TWO,
    Load,
)

Report = dict[str, Any]

SEEDS: Final = (1, 2)
TWOS: Final = (1.0, 1.36, 1.6, TWO, 2.0)
"""None; Katz Fig. 18 (SDXL on H800); xDiT (FLUX.1 dev on H100, Ulysses, 4.30 s over 2.68 s); the
paper's; guidance split in two.
"""
LOADS_S: Final = (1 / 50.8, LOAD_S, 1 / 4.25, 1.0)
"""Seconds per GiB: the link of an H200 and whole copies of pages, measured; the paper's; a disk."""
SYSTEMS: Final = ("planned", "ours", "lego")


def inputs() -> list[Input]:
    """Every input of the study."""
    flux, sd3, sd35 = BASES["dev"], BASES["sd3"], BASES["sd35"]
    first_run = "`scripts/bench gpu_run --machine`, docs/gpu.md"
    return [
        Input("workflows, devices", "S1 to S6; 8, 16", "problem", "Table 2, §7.2"),
        Input("due times", "2 times alone", "problem", "§7.1"),
        Input(
            "steps", "28, 28, 4, 50", "published", "§7.1: 4 to 50; 28 is diffusers' default for SD3"
        ),
        Input(
            "sizes of models",
            f"{sd3.step[0]:g}, {sd35.step[0]:g}, {flux.step[0]:g} GiB",
            "published",
            "2.1, 8.1 and 11.9 billion parameters in 16 bits; §7.3: SD3 3.9",
        ),
        Input(
            "sizes of ControlNets",
            f"{sd3.net[0]:g}, {sd35.net[0]:g}, {flux.net[0]:g} GiB",
            "assumed",
            "FLUX: 6 % of the base (§7.3)",
        ),
        Input(
            "a FLUX step",
            f"{1e3 * flux.step[1]:g} ms",
            "assumed",
            f"measured on an H200: 115 ({first_run}); xDiT on an H100: 150",
        ),
        Input(
            "SD3's and SD3.5's step",
            f"{1e3 * sd3.step[1]:g}, {1e3 * sd35.step[1]:g} ms",
            "assumed",
            "rates are shares of the devices' work, so only ratios matter",
        ),
        Input(
            "prompt, decoding",
            f"{1e3 * flux.text[1]:g}, {1e3 * flux.vae[1]:g} ms",
            "assumed",
            f"measured on an H200: 24, 85 ({first_run})",
        ),
        Input("a ControlNet's call", "0.35, 0.4, 0.06 of a step", "assumed", "by its size"),
        Input("calls together", "8 prompts, 4 decodings", "assumed", "Fig. 3 right has no values"),
        Input("overhead of a call", f"{1e3 * OVERHEAD_S:g} ms", "assumed", "1.3 % of SD3's step"),
        Input("shares of workflows", str(SHARES), "assumed", "of a base; the trace is not at hand"),
        Input("room on a card", f"{ROOM:g} of 80 GB", "assumed", "also: small, whole cards"),
        Input(
            "two devices over one",
            ", ".join(f"{two:g}" for two in TWOS),
            "published",
            "none, Katz Fig. 18, xDiT, **the paper's own**, guidance split; table below",
        ),
        Input(
            "seconds to load a GiB",
            ", ".join(f"{load_s:.2f}" for load_s in LOADS_S),
            "measured",
            f"link ({first_run}), **the paper's own**, pages ({first_run}), a disk (assumed)",
        ),
    ]


def base_load(setting: str) -> Load:
    """Return the load of a setting with the default inputs."""
    devices = DEVICES[setting]
    return Load(setting, 1.0, devices, PER_DEVICE * devices, 1)


def run_inputs(say: Callable[[str], None], seeds: Sequence[int] = SEEDS) -> Report:
    """Return the rates of each setting over both ranges, one at a time.

    Args:
        say: prints progress.
        seeds: of the draws.
    """
    say(f"seeds {', '.join(map(str, seeds))}")
    report: Report = {"seeds": list(seeds), "inputs": inputs(), "two": {}, "load_s": {}}
    for name, value in (*(("two", v) for v in TWOS), *(("load_s", v) for v in LOADS_S)):
        changed: dict[str, Any] = {name: value}
        report[name][f"{value:.2f}"] = {
            setting: rates(replace(base_load(setting), **changed), seeds, SYSTEMS)
            for setting in SETTINGS
        }
        say(f"{name} {value:.2f}")
    return report


def range_table(report: Report) -> str:
    """Our rate over planned monoliths', and lego's share in time at our rate: medians."""
    rows = []
    for name, words in (("two", "two devices"), ("load_s", "a GiB, s")):
        for value, by_setting in report[name].items():
            cells = [
                f"{_over(figures):.2f}, {statistics.median(figures['lego_at_ours']):.2f}"
                for figures in by_setting.values()
            ]
            rows.append((f"{words}: {value}", *cells))
    return table(("ours over planned, lego in time", *SETTINGS), rows)


def _over(figures: Report) -> float:
    pairs = zip(figures["ours"], figures["planned"], strict=True)
    return statistics.median(float(shared / planned) for shared, planned in pairs)


def tables(report: Report) -> list[str]:
    """Return the tables of docs/benchmarks/legodiffusion.md."""
    return [inputs_table(inputs()), range_table(report)]
