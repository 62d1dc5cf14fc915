"""Measure the cost of adapters: steps of rows with LoRAs or a ControlNet, over the same steps
without.

    python scripts/bench bench_adapters --only lora control --json adapters.json

`lora_step_ratio`: eight cached rows of FLUX's width, random weights, one double and one single
block. Each row has its own LoRA of rank 16 on every linear layer. Rows stay packed. Steps with and
without LoRAs are timed in turn, and medians are compared. Steps that also compute the
vectors of later steps come as often as in an edit.

`lora_edits_ratio`: edits per second of the demo model with LoRAs over those without.
`lora_vs_one_per_batch`: the same over those of a server with one LoRA per batch (`lora_edits`).

`lora_fast_added_ms`: the time that a LoRA on storage with a second of latency adds to an edit
(`lora_loading`).

The report's `bars` lists each bar (`BARS`) and whether it is met.

`control_flux`: a cached row of FLUX's width at mask ratio .11 with a ControlNet, 11 blocks and 3 of
the net (FLUX.1: 57 and 15), all with the weights of one double and one single block. The time is
averaged over the steps between two refreshes (`REFRESH`). `dense_control_flux` computes all of the
ControlNet's tokens at every step. `…_count` is the ratio by FLOPs for these blocks, and
`…_flux_dev_count` for FLUX.1-dev at 1024 pixels with 5 + 10 blocks.

`control_sdxl` and its companions: the same for a cached row of SDXL at 0.3 of its width, one pass,
at mask ratio .2, with a ControlNet of its size. `…_xl_count` is for SDXL at 1024 pixels.

`service_of_limit`: the time of a dense step with a ControlNet beside the base over the time with
the ControlNet in a service, on a core each, as a share of the limit by FLOPs (`control_service`).
`service_speedup` is the value before that division.

`three_controls_of_limit`: the same for three ControlNets in three services on emulated devices
(`emulated_controls`). `…_alone_ms` is a step with all nets on the base's device, and
`…_one_service_ms` a step with all nets in one service. `…_bus_…` also counts the residuals' way
through host memory. `three_controls_over_one` is a step with three ControlNets in three services
over a step with one in one service; `three_links_over_one` is the same for edits over a link of 10
Gbit/s from each service.

`ahead_over_free_link`: an edit whose ControlNet is in a service behind 10 Gbit/s, with `adapters:
fast`, over an edit without a network between them (both emulated). `exact_…` is for steps that
wait.

`served_ms`: milliseconds of an edit with no, one and three ControlNets and two LoRAs, at a real
server with the nets beside the base, in one service and in three, and in diffusers' pipeline with
the same models (`served_edits`; Katz Fig. 14 in form).

`cfg_pair`: a step of a guided row by two processes of one core, one pass each, over both passes in
one process (`cfg_pair.py`; SDXL at 0.3 of its width). `…_two_workers`: edits per second of two such
processes with an edit each, over one process. The same figures exist for a cached row and for
FLUX's width.
"""

from __future__ import annotations

import argparse
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maskserve_benchmarks.edits.lora_edits import lora_edits
from maskserve_benchmarks.published_models import FLUX_DEV, SDXL
from maskserve_benchmarks.reports import about, write_json, write_page
from maskserve_benchmarks.steps.replay import refreshed_every
from maskserve_benchmarks.steps.step import packed_steps
from maskserve_benchmarks.steps.step_rig import Bench
from maskserve_benchmarks.steps.unet_rig import TEXT, UNETS, UnetBench
from maskserve_benchmarks.timing import Timer, hardware
from maskserve_engine.base.job import ControlInput
from maskserve_engine.families.control import RowControl
from maskserve_engine.families.flux.spec import flux_work
from maskserve_engine.families.mmdit.blocks import LEAST_PRECOMPUTED_STEPS
from maskserve_engine.families.mmdit.control import (
    FluxControlNet,
    FluxNetInput,
    NetPrompt,
    spread_in_runs,
)
from maskserve_engine.families.mmdit.weights import FluxWeights
from maskserve_engine.families.unet.spec import control_work, unet_work
from maskserve_engine.layers.linear import linear
from maskserve_engine.planning.flops import ModelWork
from maskserve_studies.adapters.cfg_pair import cfg_pair
from maskserve_studies.adapters.control_service import service_step
from maskserve_studies.adapters.emulated_controls import slow_link, three_controls
from maskserve_studies.adapters.lora_loading import lora_loading
from maskserve_studies.adapters.served_edits import served_edits, served_text

ROWS, RANK, RATIO = 8, 16, 0.25
CONTROL_RATIO, UNET_CONTROL_RATIO = 0.11, 0.2
UNET_PRESET = "sdxl-narrow-512"
REFRESH = 7
"""Default distance between refresh steps. The cached residuals are then as old as the anchors of
FLUX.1 models other than Fill.
"""
BASE_BLOCKS, NET_BLOCKS = (4, 7), (1, 2)
TEXT_TO_TOKENS = 512 / 4096
"""Text tokens over image tokens for a picture of 1024 pixels."""


def lora_step(args: argparse.Namespace) -> dict[str, Any]:
    """Time steps of ROWS rows, each with its own LoRA, and steps without LoRAs."""
    dtype, device = getattr(torch, args.dtype), torch.device(args.device)
    bench = Bench("flux-256", (1, 1), dtype, device, "model")
    bench.fill_entry("kv")
    plain, lora_rows = ([bench.row(RATIO, seed) for seed in range(ROWS)] for _ in range(2))
    for row in lora_rows:
        row.adapters = ((bench.lora(RANK), 0.8),)
    timer = Timer(device, args.clock)
    batches = [
        packed_steps(bench, LEAST_PRECOMPUTED_STEPS, partial(bench.step, rows, "kv"))
        for rows in (plain, lora_rows)
    ]
    for steps in batches:
        steps(1)
    plain_ms, lora_ms = (ms / LEAST_PRECOMPUTED_STEPS for ms in timer.in_turn(batches, args.repeat))
    return {
        "rows": ROWS,
        "rank": RANK,
        "step_ms": round(plain_ms, 2),
        "lora_step_ms": round(lora_ms, 2),
        "lora_step_ratio": round(lora_ms / plain_ms, 4),
    }


def control_step(args: argparse.Namespace) -> dict[str, Any]:
    """Time steps of a cached row with a ControlNet, and without one."""
    dtype, device = getattr(torch, args.dtype), torch.device(args.device)
    refresh = args.refresh
    bench = Bench("flux-256", (1, 1), dtype, device, "model", steps=refresh)
    base_weights = bench.weights
    bench.weights = _repeated(base_weights, BASE_BLOCKS)
    bench.blocks = sum(BASE_BLOCKS)
    tokens = bench.work.tokens[0]
    bench.text = round(TEXT_TO_TOKENS * tokens)
    bench.fill_entry("kv")
    net = _net(_repeated(base_weights, NET_BLOCKS), bench)
    plain, control_row, dense = (bench.row(CONTROL_RATIO, 0) for _ in range(3))
    for row, interval in ((control_row, refresh), (dense, 1)):
        with torch.inference_mode():
            hint = net.hint_embedder(row.latents.new_ones(tokens, net.channels), ((0, tokens),))
        control = ControlInput("net", np.zeros((0, 0, 3), np.uint8))
        prompts = (NetPrompt(row.prompt.text, row.prompt.pooled),)
        net_input = FluxNetInput(control, net, hint, prompts, row.prompt.guidance)
        row.residuals = RowControl((net_input,), refreshed_every(interval, refresh))
    plain_ms, control_ms, dense_ms = _in_turn(bench, (plain, control_row, dense), refresh, args)
    tiny = [_control_count(bench.config, BASE_BLOCKS, NET_BLOCKS, 32, n) for n in (refresh, 1)]
    full = [_control_count(FLUX_DEV, (19, 38), (5, 10), 128, n) for n in (refresh, 1)]
    return {
        "control_step_without_ms": round(plain_ms, 1),
        "control_step_ms": round(control_ms, 1),
        "control_flux": round(control_ms / plain_ms, 3),
        "control_flux_count": round(tiny[0], 3),
        "control_flux_dev_count": round(full[0], 3),
        "dense_control_flux": round(dense_ms / plain_ms, 3),
        "dense_control_flux_count": round(tiny[1], 3),
        "dense_control_flux_dev_count": round(full[1], 3),
        "control_refresh": refresh,
    }


def unet_control_step(args: argparse.Namespace) -> dict[str, Any]:
    """Time steps of a cached row of a UNet with a ControlNet, and without one."""
    dtype, device = getattr(torch, args.dtype), torch.device(args.device)
    refresh = args.refresh
    bench = UnetBench(UNET_PRESET, dtype, device, "model", steps=refresh)
    bench.fill_entry("kv")
    net = bench.net()
    plain, control_row, dense = (bench.row(UNET_CONTROL_RATIO, 0) for _ in range(3))
    bench.control(control_row, net, refresh)
    bench.control(dense, net, 1)
    plain_ms, control_ms, dense_ms = _in_turn(bench, (plain, control_row, dense), refresh, args)
    narrow = [_unet_control_count(UNETS[UNET_PRESET], n) for n in (refresh, 1)]
    full = [_unet_control_count(SDXL, n) for n in (refresh, 1)]
    return {
        "control_sdxl_step_without_ms": round(plain_ms, 1),
        "control_sdxl_step_ms": round(control_ms, 1),
        "control_sdxl": round(control_ms / plain_ms, 3),
        "control_sdxl_count": round(narrow[0], 3),
        "control_sdxl_xl_count": round(full[0], 3),
        "dense_control_sdxl": round(dense_ms / plain_ms, 3),
        "dense_control_sdxl_count": round(narrow[1], 3),
        "dense_control_sdxl_xl_count": round(full[1], 3),
    }


def _in_turn(
    bench: Bench | UnetBench, rows: Sequence[Any], steps: int, args: argparse.Namespace
) -> list[float]:
    """Milliseconds of a cached step of each row alone. The rows take turns."""
    timer = Timer(torch.device(args.device), args.clock)
    batches = [packed_steps(bench, steps, partial(bench.step, [row], "kv")) for row in rows]
    for row in rows:
        bench.step([row], "kv")
        row.step = 0
    return [ms / steps for ms in timer.in_turn(batches, args.repeat)]


def _unet_control_count(config: Mapping[str, Any], refresh: int) -> float:
    """FLOPs of a cached UNet step with a ControlNet of the UNet's size over those without."""
    unet_config, side = dict(config), int(config["sample_size"])
    work, net_work = (
        count(unet_config, side, side, guidance=False) for count in (unet_work, control_work)
    )
    row = work.row_at(UNET_CONTROL_RATIO, TEXT)
    whole, active = (net_work.step_flops([row], kind) for kind in ("dense", "kv"))
    mean = (whole + (refresh - 1) * active) / refresh
    return 1.0 + mean / work.step_flops([row], "kv")


def _repeated(weights: FluxWeights, blocks: tuple[int, int]) -> FluxWeights:
    """A model with these numbers of double and single blocks, all with the weights of the first
    block.
    """
    doubles, singles = blocks
    return replace(
        weights,
        double_blocks=weights.double_blocks[:1] * doubles,
        single_blocks=weights.single_blocks[:1] * singles,
    )


def _net(weights: FluxWeights, bench: Bench) -> FluxControlNet:
    """A FluxControlNetModel of these blocks, beside the bench's base."""
    width, channels = weights.width, int(bench.config["in_channels"])
    layers = [torch.nn.Linear(n, width) for n in (channels, width)]
    hint, out = (linear(layer.to(bench.device, bench.dtype)) for layer in layers)
    net_weights = replace(weights, last_vectors=None, proj_out=None)
    doubles, singles = NET_BLOCKS
    places = (
        *spread_in_runs(doubles, 0, BASE_BLOCKS[0]),
        *spread_in_runs(singles, BASE_BLOCKS[0], BASE_BLOCKS[1]),
    )
    return FluxControlNet(
        net_weights, hint, (out,) * len(places), None, None, channels, BASE_BLOCKS, places
    )


def _control_count(
    config: Mapping[str, Any],
    base: tuple[int, int],
    net: tuple[int, int],
    side: int,
    refresh: int,
) -> float:
    """FLOPs of a cached step with a ControlNet over those without, on average over its steps.

    Args:
        config: of the base model.
        base: (double, single) blocks of the base model.
        net: (double, single) blocks of the ControlNet.
        side: side of the picture's latents.
        refresh: steps from one refresh step to the next.
    """

    def work_of(blocks: tuple[int, int]) -> ModelWork:
        flux_config = {**config, "num_layers": blocks[0], "num_single_layers": blocks[1]}
        return flux_work(flux_config, side, side)

    work, net_work = work_of(base), work_of(net)
    tokens = work.tokens[0]
    row = work.row_at(CONTROL_RATIO, TEXT_TO_TOKENS * tokens)
    width = work.blocks[0].width
    out = 2.0 * width * width * sum(net)  # for each computed token, behind each block
    whole = net_work.step_flops([row], "dense") + out * tokens
    active = net_work.step_flops([row], "kv") + out * CONTROL_RATIO * tokens
    mean = (whole + (refresh - 1) * active) / refresh
    return 1.0 + mean / work.step_flops([row], "kv")


_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "at most": operator.le,
    "at least": operator.ge,
    "above": operator.gt,
}
BARS = {
    "lora_step_ratio": ("at most", 1.08),
    "lora_edits_ratio": ("at least", 0.9),
    "lora_vs_one_per_batch": ("at least", 1.3),
    "lora_fast_added_ms": ("at most", 50.0),
    "lora_mate_step_ratio": ("at most", 1.02),
    "control_flux": ("at most", 1.54),
    "dense_control_flux": ("above", 1.54),
    "control_sdxl": ("at most", 1.66),
    "dense_control_sdxl": ("above", 1.66),
    "service_of_limit": ("at least", 0.85),
    "three_controls_of_limit": ("at least", 0.94),
    "three_controls_over_one": ("at most", 1.25),
    "three_controls_bus_over_one": ("at most", 1.25),
    "three_links_over_one": ("at most", 1.25),
    "ahead_over_free_link": ("at most", 1.05),
    "exact_over_free_link": ("above", 1.05),
    "cfg_pair": ("at least", 1.7),
}


def bar_results(summary: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Each measured bar, and whether it is met."""
    return {
        name: {
            "bar": f"{side} {bar:g}",
            "met": _COMPARISONS[side](summary[name], bar),
        }
        for name, (side, bar) in BARS.items()
        if name in summary
    }


PARTS: dict[str, tuple[Callable[[argparse.Namespace], dict[str, Any]], ...]] = {
    "lora": (lora_step, lora_edits, lora_loading),
    "control": (
        control_step,
        unet_control_step,
        lambda args: service_step(args.repeat, args.clock),
        cfg_pair,
    ),
    "services": (
        lambda args: three_controls(args.repeat),
        lambda args: slow_link(args.repeat),
    ),
    "served": (lambda args: served_edits(args.repeat, args.seed, tiny=args.tiny),),
}
"""Measurements by the name that `--only` takes."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", choices=tuple(PARTS), nargs="+", default=list(PARTS))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--repeat", type=int, default=3, help="rounds of each part")
    parser.add_argument("--refresh", type=int, default=REFRESH, help="of control")
    parser.add_argument("--seed", type=int, default=0, help="of served")
    parser.add_argument("--tiny", action="store_true", help="served in two steps of 64 pixels")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help="write served here (Markdown)")
    args = parser.parse_args()
    torch.manual_seed(0)
    summary: dict[str, Any] = {}
    for part in args.only:
        for measure in PARTS[part]:
            summary |= measure(args)
    bars = bar_results(summary)
    for name, value in summary.items():
        result = bars.get(name)
        bar = f"  ({result['bar']}: {'met' if result['met'] else 'MISSED'})" if result else ""
        print(f"{name:24} {value}{bar}")
    if "served_ms" in summary:
        print(served_text(summary))
    result = {"torch": torch.__version__, "summary": summary, "bars": bars}
    report = about(hardware(torch.device(args.device))) | result
    write_json(report, args.json)
    if "served_ms" in summary:
        write_page("Edits with adapters", served_text(summary), report, args.page)
    return 0
