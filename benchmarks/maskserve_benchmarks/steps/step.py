"""Measure how much faster a step of cached rows is than a step of dense rows, and compare the gain
with the limit that FLOPs set.

The model has its true width and random weights; on a CPU use its first blocks (`--blocks 1+1`:
double + single). Dense and cached steps take turns inside one run; the output has medians.
`flop_limit` is the counted FLOPs of the dense step over those of the cached one
(planning/flops.py), and `of_limit` the gain as a share of it. `rest_ms` is the time of a cached
step outside blocks: loading and decoding entries, packing, filling keys, embedders, final layer,
sampler.

    python scripts/bench step --preset flux-1024 --blocks 1+1 --json step.json

Rows are packed before the first timed step, as a worker packs an edit's row once. `--kind no-text`
times steps between two refresh steps: they compute no text, and read the row's step cache.

Every eighth step of a FLUX row computes the vectors of eight steps, so `--steps 8` times eight
steps together and reports their mean. (On a CPU set the allocator as `maskserve serve` does for its
workers: `maskserve_serving/command.py`, TUNING.)

`--trace FILE` writes a profile of three cached steps for Perfetto or chrome://tracing. The preset
`demo-narrow` is the demo model with minimal width and few tokens: its steps take the time of
launching operations.

UNets (`sdxl-1024`, `sd21-768`) are timed whole, one pass per row. They have `convolutions_ms`, the
time of one more cached step in convolutions, instead of `rest_ms`. `--halo` runs convolutions on
tiles; the timed steps read the same entry as the step before.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from maskserve_benchmarks.reports import about, write_json
from maskserve_benchmarks.steps.step_rig import NO_TEXT, PRESETS, Bench
from maskserve_benchmarks.steps.unet_rig import UNETS, UnetBench
from maskserve_benchmarks.timing import Timer, hardware
from maskserve_common.config import ENTRY_FORMATS
from maskserve_engine.batch import forward as forward_module
from maskserve_engine.families.mmdit.rows import FlowRow

_PARTS = (
    ("rest", "rest_ms"),
    ("convolutions", "convolutions_ms"),
)


def rest_time(bench: Bench, timer: Timer, rows: Sequence[FlowRow], kind: str) -> float:
    """Return the milliseconds of one cached step outside the blocks: loading and decoding entries,
    packing, embedders, final layer, sampler. The time in which blocks fill in cached keys also
    counts.
    """
    spent = {"blocks": 0.0, "fill": 0.0}
    parts: tuple[tuple[Any, str, str], ...] = (
        (bench.family.step, "pre", "blocks"),
        (bench.family.step, "post", "blocks"),
        (forward_module.State, "attend", "blocks"),
        (forward_module.State, "_load", "fill"),
    )
    originals = [getattr(owner, name) for owner, name, _ in parts]

    def timed(function: Any, part: str) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            out: list[Any] = []
            spent[part] += timer.ms(lambda: out.append(function(*args, **named)))
            return out[0]

        return call

    for (owner, name, part), original in zip(parts, originals, strict=True):
        setattr(owner, name, timed(original, part))
    try:
        whole = timer.ms(partial(bench.step, rows, kind))
    finally:
        for (owner, name, _), original in zip(parts, originals, strict=True):
            setattr(owner, name, original)
    return whole - spent["blocks"] + spent["fill"]


def measure(bench: Bench | UnetBench, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every kind and batch in turn."""
    results = []
    for kind in args.kind:
        bench.fill_entry("kv" if kind == NO_TEXT else kind)
        for batch in args.batch:
            mixes = [[m] * batch for m in args.mask_ratios]
            if batch > 1 and not args.alike:
                mixes = [[args.mask_ratios[i % len(args.mask_ratios)] for i in range(batch)]]
            timer = Timer(bench.device, args.clock)
            results += measure_mixes(bench, timer, kind, mixes, args.repeat, args.steps)
    return results


def measure_mixes(
    bench: Bench | UnetBench,
    timer: Timer,
    kind: str,
    mixes: Sequence[Sequence[float]],
    repeat: int,
    count: int,
) -> list[dict[str, Any]]:
    """Time a dense batch and cached batches of these mask ratios in turn, in `repeat` rounds of
    `count` steps each.
    """
    dense: list[Any] = [bench.row(None, i) for i in range(len(mixes[0]))]
    make: Any = bench.refreshing_row if kind == NO_TEXT else bench.row  # type: ignore[union-attr]
    cached: list[Any] = [[make(m, i) for i, m in enumerate(mix)] for mix in mixes]
    steps = [packed_steps(bench, count, partial(bench.step, dense, "kv"))]
    steps += [packed_steps(bench, count, cached_step(bench, rows, kind)) for rows in cached]
    for step in steps if repeat > 1 else steps[1:2]:
        step()
    rounds = [[timer.ms(step) / count for step in steps] for _ in range(repeat)]
    dense_times, *times = map(list, zip(*rounds, strict=True))
    results = []
    for mix, rows, mix_times in zip(mixes, cached, times, strict=True):
        results.append(_result(bench, kind, mix, dense_times, mix_times))
        if kind == NO_TEXT:
            pass
        elif isinstance(bench, Bench):
            rest_ms = [rest_time(bench, timer, rows, kind) for _ in range(3)]
            results[-1]["rest_ms"] = round(statistics.median(rest_ms), 3)
        else:
            spent = bench.convolutions_ms(timer, rows, kind)
            results[-1]["convolutions_ms"] = round(spent, 3)
        print(_line(results[-1]), flush=True)
    return results


def cached_step(bench: Bench | UnetBench, rows: Sequence[Any], kind: str) -> Callable[[], None]:
    """Return a function that takes a step of these cached rows. Rows with refresh steps alternate
    between two of the steps between them.
    """
    if kind != NO_TEXT:
        return partial(bench.step, rows, kind)
    assert isinstance(bench, Bench), "the text of a UNet is in attention of its own"
    turns = cycle((3, 4))
    return lambda: bench.between(rows, next(turns))


def packed_steps(
    bench: Bench | UnetBench, count: int, step: Callable[[], None], weights: Any = None
) -> Callable[..., None]:
    """Return a function that takes `count` steps, or as many as its argument says. Its rows stay
    packed while other batches run. `weights` replace the bench's, if given.
    """
    batch: Any = None

    def steps(count: int = count) -> None:
        nonlocal batch
        bench.batch = batch
        bench.weights = weights or bench.weights
        for _ in range(count):
            step()
        batch = bench.batch

    return steps


def write_trace(bench: Bench | UnetBench, kind: str, ratios: Sequence[float], file: Path) -> None:
    """Write a trace of three steps of cached rows of these mask ratios, in Chrome's format."""
    bench.fill_entry(kind)
    rows: list[Any] = [bench.row(ratio, seed) for seed, ratio in enumerate(ratios)]
    activities = [ProfilerActivity.CPU]
    if bench.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    bench.step(rows, kind)
    with profile(activities=activities) as trace:
        for _ in range(3):
            bench.step(rows, kind)
    trace.export_chrome_trace(str(file))


def _result(
    bench: Bench | UnetBench,
    kind: str,
    mix: Sequence[float],
    dense: Sequence[float],
    cached: Sequence[float],
) -> dict[str, Any]:
    dense_ms, ms = statistics.median(dense), statistics.median(cached)
    limit = bench.limit(mix, kind)
    return {
        "mask_ratio": mix[0] if len(set(mix)) == 1 else list(mix),
        "kind": kind,
        "format": bench.format,
        "batch": len(mix),
        "dense_ms": round(dense_ms, 3),
        "ms": round(ms, 3),
        "speedup": round(dense_ms / ms, 3),
        "flop_limit": round(limit, 3),
        "of_limit": round(dense_ms / ms / limit, 3),
    }


def _line(r: dict[str, Any]) -> str:
    ratio = f"{r['mask_ratio']:.2f}" if isinstance(r["mask_ratio"], float) else "mixed"
    return (
        f"{r['kind']:8} batch {r['batch']} m {ratio:>5}  dense {r['dense_ms']:9.1f} ms  "
        f"cached {r['ms']:9.1f} ms  {r['speedup']:5.2f}x of {r['flop_limit']:5.2f}x "
        f"= {r['of_limit']:.2f}"
        + "".join(f"  {name} {r[key]:.1f} ms" for name, key in _PARTS if key in r)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--preset", choices=(*PRESETS, *UNETS), default="flux-1024")
    parser.add_argument(
        "--blocks",
        help="double+single blocks to keep, such as 1+1; all if absent "
        "(Z-Image: the picture's own + joint)",
    )
    parser.add_argument("--mask-ratios", type=float, nargs="+", default=[0.05, 0.11, 0.2, 0.35])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument(
        "--alike", action="store_true", help="a batch per mask ratio, not one of all in turn"
    )
    kinds = ("kv", "project", NO_TEXT)
    parser.add_argument("--kind", nargs="+", choices=kinds, default=list(kinds[:2]))
    parser.add_argument("--format", choices=ENTRY_FORMATS, default="model")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--repeat",
        type=int,
        default=5,
        help="rounds, after one that warms up, or a cached step if 1",
    )
    parser.add_argument("--steps", type=int, default=1, help="in a row, in each round")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument(
        "--halo", type=int, default=0, help="[cache] conv_halo; 0: convolve the whole picture"
    )
    parser.add_argument("--placed-bytes", type=int, help="[cache] placed_bytes")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="profile cached steps")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    blocks = None
    if args.blocks:
        double, _, single = args.blocks.partition("+")
        if not (double.isdigit() and single.isdigit()):
            parser.error("--blocks: give double+single, such as 1+1")
        blocks = (int(double), int(single))
    device = torch.device(args.device)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    bench: Bench | UnetBench
    if args.preset in UNETS:
        if blocks:
            parser.error("--blocks: UNets are timed whole")
        if NO_TEXT in args.kind:
            parser.error(f"--kind {NO_TEXT}: of FLUX alone")
        bench = UnetBench(args.preset, dtype, device, args.format, args.halo)
    else:
        if args.halo:
            parser.error("--halo: of UNets alone")
        bench = Bench(args.preset, blocks, dtype, device, args.format)
        if args.placed_bytes is not None:
            bench.weights = replace(bench.weights, placed_bytes=args.placed_bytes)
    print(f"{args.preset}, {bench.blocks} blocks, {args.dtype}, {hardware(device)}", flush=True)
    results = measure(bench, args)
    if args.trace:
        write_trace(bench, args.kind[0], args.mask_ratios[: args.batch[0]], args.trace)
    report = {**about(hardware(device)), "torch": torch.__version__, "rows": results}
    write_json(report, args.json)
    return 0
