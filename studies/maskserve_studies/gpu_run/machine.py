"""Measurements of a machine with a GPU, in under 10 minutes: a JSON file and its page.

The file is written anew after each part. Each part has a limit (`LIMITS_S`), and all parts together
have one. A part that fails or takes too long has a reason in place of its figures, and the next one
begins. In this order the parts are:

- the attention kernel in use, and the speed at which entries reach the device;
- steps of SDXL, also of rows with refresh steps;
- T5 and the VAE;
- steps of FLUX.1-dev's size (random weights) as a worker takes them, also between refresh steps;
- steps that load their entries at the same time;
- diffusers' own transformer in turn: as it is, compiled, and in FP8;
- steps compared with the time of their FLOPs at the device's published peak, with entries in int8
  and in the default format;
- attention and the placing of entries by themselves;
- rows of several mask ratios, the host's time to launch a step, and the memory of a step, compared
  with the memory table;
- whether tests/gpu pass.

A page with plots is written beside the JSON file. For a card that cannot hold the whole model, use
fewer blocks: `--blocks 4 8`.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.metadata
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.reports import write_json
from maskserve_benchmarks.steps.step import cached_step, measure, packed_steps
from maskserve_benchmarks.steps.step_rig import NO_TEXT, PRESETS, Bench
from maskserve_benchmarks.steps.unet_rig import UNETS, UnetBench
from maskserve_benchmarks.timing import Timer, hardware
from maskserve_common.config import CacheConfig
from maskserve_common.contracts.reuse_levels import refresh_count
from maskserve_common.contracts.semantics import FILL
from maskserve_engine.batch.graphs import Graphs
from maskserve_engine.batch.step_cache import RefreshSchedule
from maskserve_engine.cache.entries import encode
from maskserve_engine.cache.loader import CudaMover, HostMover, Mover
from maskserve_engine.families.flux.spec import REFRESH_STRIDES
from maskserve_engine.fitting.memory import device_memory, peak_values
from maskserve_engine.layers.attention import choose_flash, missing_varlen
from maskserve_engine.stages.device_probe import peak_rates
from maskserve_studies.gpu_run.machine_page import write_page
from maskserve_studies.gpu_run.machine_parts import (
    RIVALS,
    as_served,
    in_turn,
    time_attention,
    time_loads,
    time_placing,
    time_rivals,
    time_stages,
)
from maskserve_studies.gpu_run.run import STUCK_S, limited_call
from maskserve_studies.kernels.live_bytes import peak_bytes

BATCHES, RATIOS = (1, 4, 8), (0.05, 0.11, 0.2, 0.35)
SERVED = (1, 8)
"""Numbers of rows in the batches of `time_served_steps`."""
KINDS = ("kv", "project")
FORMAT, DEFAULT = "int8", CacheConfig().entry_format
MIXED = (2, 4, 8)
"""Numbers of rows in batches whose rows all have different mask ratios."""
STEPS = 28
"""Steps of an edit whose picture is new."""
_UNRECORDED = 2
"""Steps of a batch before and with its recording."""
LIMITS_S: Mapping[str, float] = {
    "attention": 30,
    "gb_per_s": 30,
    "unet_steps": 75,
    "unet_own": 75,
    "stages": 60,
    "model": 60,
    "served": 120,
    "loads": 90,
    "rivals": 150,
    "steps": 90,
    "attention_ms": 30,
    "placing": 30,
    "mixed": 60,
    "asked": 30,
    "held": 30,
    "tests_passed": 300,
}
"""Seconds of each part on a GPU, in the order in which they run."""
WHOLE_S = 560.0
"""Seconds of all parts on a GPU; what comes after them is not measured."""
_ENDLESS_S = 1e6
_BUFFER = 32 * 2**20
_SENT, _WIDTH = 2**28, 3072
"""Bytes that the loader's measurement sends, and bytes of each of its tokens."""


def versions(device: torch.device) -> dict[str, str]:
    """Versions of the software that decides which kernels run, and the device's driver, clocks and
    power limit.
    """
    names = ("diffusers", "torchao", "bitsandbytes", "triton", "flash-attn-3", "flash-attn-4")
    by_name = {}
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            by_name[name] = importlib.metadata.version(name)
    if device.type == "cuda":
        by_name["CUDA"], by_name["cuDNN"] = (
            str(torch.version.cuda),
            str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        )
        fields = "driver_version,clocks.sm,clocks.max.sm,clocks.max.mem,power.limit"
        with suppress(OSError, subprocess.SubprocessError):
            output = subprocess.run(
                ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
                capture_output=True, text=True, timeout=30, check=True,
            )  # fmt: skip
            by_name[fields] = output.stdout.strip().splitlines()[device.index or 0]
    return by_name


def run_tests(device: torch.device) -> bool:
    """Return whether tests/gpu pass there."""
    # Other packages of the machine may warn.
    flags = "-q", "-ra", "-W", "ignore", "-p", "no:cacheprovider"
    command = [sys.executable, "-m", "pytest", *flags, str(CHECKOUT / "tests" / "gpu")]
    env = {**os.environ, "MASKSERVE_GPU_TESTS": device.type}
    return subprocess.run(command, cwd=CHECKOUT, env=env, check=False).returncode == 0


def time_steps(bench: Bench, repeat: int) -> list[dict[str, Any]]:
    """Time dense and cached steps, also with entries in the default format. `limit_ms` is the time
    of the FLOPs at the device's published peak.
    """
    rows = []
    for format, kinds, batches in ((FORMAT, KINDS, BATCHES), (DEFAULT, ("kv",), BATCHES[:1])):
        bench.format = format
        timings = measure(bench, _measure_options(repeat, kind=kinds, batch=batches, alike=True))
        rows += [{**row, "format": format} for row in timings]
    bench.format = FORMAT
    peak = peak_rates(bench.device, bench.dtype)
    for row in rows:
        tokens = [bench.work.row_at(row["mask_ratio"], bench.text)] * row["batch"]
        for name, kind in (("dense_limit_ms", "dense"), ("limit_ms", row["kind"])):
            flops = bench.work.step_flops(tokens, kind)
            row[name] = round(1e3 * flops / peak.product_flops, 3)
    return rows


def time_served_steps(bench: Bench, repeat: int) -> list[dict[str, Any]]:
    """Time steps as a worker takes them (`ms`), in turn with dense steps. Steps with few tokens are
    recorded. The rows either read an entry, or are between refresh steps and leave their text out
    (`NO_TEXT`). `of_limit` is the measured gain over the dense step, as a share of the gain that
    the FLOPs allow.

    A single row is also timed kernel by kernel (`asked_ms`). For rows with refresh steps there is
    also a step with one more pass over all tokens, as a lookahead takes (`anchor_ms`,
    `anchor_of_limit`). `edit_times` is the speed-up of a whole edit of `STEPS` steps with one such
    row over a dense edit.
    """
    weights, served = bench.weights, as_served(bench)
    bench.fill_entry("kv")
    mixes = product(SERVED, ("kv", NO_TEXT), RATIOS)
    served_steps = [served_step(bench, served, *mix, repeat) for mix in mixes]
    bench.weights, bench.batch = weights, None
    return served_steps


def served_step(
    bench: Bench, served: Any, batch: int, kind: str, ratio: float, repeat: int
) -> dict[str, Any]:
    weights, is_between = bench.weights, kind == NO_TEXT
    timer, make = Timer(bench.device), bench.refreshing_row if is_between else bench.row
    dense: list[Any] = [bench.row(None, n) for n in range(batch)]
    rows: list[Any] = [make(ratio, n) for n in range(batch)]
    for row in rows:
        row.recorded = True
    variants = {"dense_ms": packed_steps(bench, 1, partial(bench.step, dense, "kv"), weights)}
    variants["ms"] = packed_steps(bench, 1, cached_step(bench, rows, kind), served)
    if batch == 1 and served.graphs is not None:
        variants["asked_ms"] = packed_steps(
            bench, 1, cached_step(bench, [make(ratio, 1)], kind), weights
        )
    step: dict[str, Any] = {"batch": batch, "kind": kind, "mask_ratio": ratio}
    step |= _steady(timer, variants, repeat)
    dense_flops, step_flops = (
        bench.flops([ratio] * batch, step_kind) for step_kind in ("dense", kind)
    )
    step["of_limit"] = round(step["dense_ms"] / step["ms"] / (dense_flops / step_flops), 3)
    if is_between:
        dense_row = bench.row(None, batch)

        def lookahead_step() -> None:
            for row in rows:
                row.step = 3
            bench.step([*rows, dense_row], "kv")

        step |= _steady(
            timer, {"anchor_ms": packed_steps(bench, 1, lookahead_step, weights)}, repeat
        )
        step_flops += bench.flops([ratio], "dense")
        share = step["dense_ms"] / step["anchor_ms"] / (dense_flops / step_flops)
        step["anchor_of_limit"] = round(share, 3)
    if is_between and batch == 1:
        refreshes = refresh_count(STEPS, REFRESH_STRIDES[FILL])
        edit = (
            step["dense_ms"]
            + (refreshes - 1) * step["anchor_ms"]
            + (STEPS - refreshes) * step["ms"]
        )
        step["edit_times"] = round(STEPS * step["dense_ms"] / edit, 3)
    bench.weights = weights
    return step


def _steady(
    timer: Timer, variants: Mapping[str, Callable[[], object]], repeat: int
) -> dict[str, float]:
    """Median milliseconds. The first calls, with their one-time work and the recording, are not
    timed.
    """
    for _ in range(_UNRECORDED):
        for call in variants.values():
            call()
    return in_turn(timer, variants, repeat)


def time_mixed_steps(bench: Bench | UnetBench, repeat: int) -> list[dict[str, Any]]:
    """Time steps of rows that all have different masks, as edits do. A UNet has one row."""
    batches = MIXED if isinstance(bench, Bench) else (1,)
    return measure(bench, _measure_options(repeat, kind=("kv",), batch=batches, alike=False))


def unet_bench(preset: str, dtype: torch.dtype, device: torch.device, steps: int = 1) -> UnetBench:
    """A UNet whose steps are recorded as a worker records them."""
    bench = UnetBench(preset, dtype, device, FORMAT, steps=steps)
    bench.weights = replace(bench.weights, graphs=Graphs.on(device, dtype))
    bench.buckets = bench.weights.graphs is not None
    return bench


def time_refresh_steps(bench: UnetBench) -> list[dict[str, Any]]:
    """Time steps of one UNet row with refresh steps: a refresh step, and a step between two refresh
    steps.
    """
    figures, timer = [], Timer(bench.device)
    for ratio in RATIOS:
        rows = [bench.row(ratio, 0, schedule=RefreshSchedule(frozenset({0}), FORMAT, text=False))]
        step = partial(bench.step, rows, "kv")
        anchors = [timer.ms(step) for _ in range(2)]
        bench.turn_between(rows)
        between = [timer.ms(step) for _ in range(4)]
        least = {"anchor_ms": round(min(anchors), 3), "ms": round(min(between), 3)}
        figures.append({"mask_ratio": ratio, **least})
    return figures


def _measure_options(repeat: int, **options: Any) -> argparse.Namespace:
    """The arguments of `measure`."""
    return argparse.Namespace(mask_ratios=RATIOS, clock="wall", repeat=repeat, steps=1, **options)


def time_launches(bench: Bench) -> list[dict[str, Any]]:
    """Time that the host needs to launch a steady step (`asked_ms`), and the time of the whole step
    (`ms`). Launches delay nothing while the first is shorter.
    """
    figures = []
    bench.fill_entry("kv")
    for batch in BATCHES:
        for ratio in (None, RATIOS[1]):
            rows = [bench.row(ratio, seed) for seed in range(batch)]
            bench.batch = None
            timer = Timer(bench.device)
            launch_ms: list[float] = []

            def step(rows: list[Any] = rows, launch_ms: list[float] = launch_ms) -> None:
                begin = time.perf_counter()
                bench.step(rows, "kv")
                launch_ms.append(1e3 * (time.perf_counter() - begin))

            step_ms = [timer.ms(step) for _ in range(5)]
            least = {"asked_ms": round(min(launch_ms[1:]), 3), "ms": round(min(step_ms[1:]), 3)}
            figures.append({"batch": batch, "mask_ratio": ratio, **least})
    bench.batch = None
    return figures


def attention_of(device: torch.device, dtype: torch.dtype) -> str:
    """The kernel that computes attention for rows of different lengths, in words."""
    if device.type != "cuda":
        return "one call for each row"
    missing = missing_varlen(device, dtype)
    if missing is not None:
        return f"one call for each row: {missing}"
    return choose_flash(torch.cuda.get_device_capability(device)[0])


def weigh_steps(bench: Bench) -> list[dict[str, Any]]:
    """Peak memory of steps, and the most that the memory table counts for as many rows."""
    figures = []
    bench.fill_entry("kv")
    for batch in BATCHES:
        for ratio in (None, RATIOS[0], RATIOS[-1]):
            rows = [bench.row(ratio, seed) for seed in range(batch)]
            bench.batch = None
            step_bytes = peak_bytes(bench.device, partial(bench.step, rows, "kv"))
            counted = peak_values(bench.work, batch, bench.text) * bench.dtype.itemsize
            figures.append(
                {"batch": batch, "mask_ratio": ratio, "held": step_bytes, "counted": counted}
            )
    bench.batch = None
    return figures


def load_gb_per_s(device: torch.device, sent: int = _SENT) -> dict[str, float]:
    """Gigabytes per second of entries from host memory: gathered and whole entries as the loader
    moves them, and the bare link. `sent` is the number of bytes.
    """
    mover: Mover = CudaMover(device, _BUFFER) if device.type == "cuda" else HostMover()
    part = encode(torch.randn(sent // _WIDTH, _WIDTH), FORMAT)
    ids = np.flatnonzero(np.random.default_rng(0).random(len(part.data)) > RATIOS[2])
    host = torch.empty(sent, dtype=torch.uint8, pin_memory=device.type == "cuda")
    device_copy = torch.empty_like(host, device=device)
    timer = Timer(device)

    def rate(nbytes: int, move: Callable[[], object]) -> float:
        def call() -> None:
            move()

        return round(nbytes / 1e6 / min([timer.ms(call) for _ in range(4)][1:]), 2)

    return {
        "gathered": rate(len(ids) * _WIDTH, lambda: mover.move((part,), ids).get()),
        "whole": rate(part.data.nbytes, lambda: mover.move((part,), None).get()),
        "link": rate(sent, lambda: device_copy.copy_(host, non_blocking=True)),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `measure_machine`, but for the parts."""
    add = parser.add_argument_group("with --machine").add_argument
    add("--preset", choices=PRESETS, help="default: flux-1024, or demo with --tiny")
    add("--blocks", type=int, nargs=2, metavar=("DOUBLE", "SINGLE"), help="default: all")
    add("--unet", choices=UNETS, help="UNet to step; default: SDXL on a GPU")
    add("--rivals", nargs="*", choices=RIVALS, default=RIVALS, help="default: all")
    add("--repeat", type=int, default=3, help="rounds of each step")


def measure_machine(
    args: argparse.Namespace,
    file: Path,
    device: torch.device,
    command: str,
    *,
    tests: Callable[[torch.device], bool] = run_tests,
    steps: Callable[[Bench, int], list[dict[str, Any]]] = time_steps,
    sent: int = _SENT,
) -> int:
    """Measure the parts, and return 1 if one failed.

    Args:
        args: flags (`add_options`), and in `machine` names of parts; none: all.
        file: JSON file of the report.
        device: the device.
        command: the command line, for the report.
        tests: runs tests/gpu.
        steps: times plain steps.
        sent: bytes that the loader's measurement sends.
    """
    is_gpu, dtype = device.type == "cuda", _dtype_on(device)
    preset = args.preset or ("demo" if args.tiny else "flux-1024")
    parts = _Parts(file, device, command, args.machine)
    if is_gpu:  # a call into a library may not return
        faulthandler.dump_traceback_later(WHOLE_S + STUCK_S, exit=True)
    parts.measure("attention", lambda: attention_of(device, dtype))
    parts.measure("gb_per_s", lambda: load_gb_per_s(device, sent))
    torch.manual_seed(0)
    unet = args.unet or ("sdxl-1024" if is_gpu else None)
    if unet is not None:
        parts.report["unet"] = unet
        make_bench = partial(unet_bench, unet, dtype, device)
        parts.measure("unet_steps", lambda: time_mixed_steps(make_bench(), 3))
        parts.measure("unet_own", lambda: time_refresh_steps(make_bench(steps=8)))
    parts.measure("stages", lambda: time_stages(device, dtype, demo=preset == "demo"))
    memory_steps = _measure_flux(parts, preset, args, steps)
    if is_gpu:
        torch.cuda.empty_cache()
    passed = parts.measure("tests_passed", lambda: tests(device))
    faulthandler.cancel_dump_traceback_later()
    write_page(parts.report, file)
    over = [row for row in memory_steps if row["held"] > row["counted"]]
    failed = parts.report["failed"]
    if "tests_passed" in parts.report:
        print(f"tests {'passed' if passed else 'FAILED'}")
    print(f"{len(over)} steps held more than counted")
    for name, why in failed.items():
        print(f"{name} FAILED: {why}")
    return 0 if passed is not False and not over and not failed else 1


class _Parts:
    """The report of a run, to which each part adds its figures, or why it has none.

    Args:
        file: JSON file of the report, which is written after each part.
        device: the device; only a GPU's parts have limits: a rehearsal may take its time.
        command: the command line, for the report.
        selected: names of the parts to measure; none: all.
    """

    def __init__(
        self, file: Path, device: torch.device, command: str, selected: Sequence[str]
    ) -> None:
        self.device = device
        self._file, self._selected, self._begin = file, selected, time.monotonic()
        self.report: dict[str, Any] = {
            "command": command,
            "date": time.strftime("%Y-%m-%d"),
            "hardware": hardware(device),
            "torch": torch.__version__,
            "versions": versions(device),
            "failed": {},
        }

    def measure(self, name: str, part: Callable[[], Any]) -> Any:
        """Return the figures of a part. None: the part is not selected, or it fails or takes too
        long; then the reason is saved.
        """
        if self._selected and name not in (*self._selected, "model"):
            return None
        limit_s = _ENDLESS_S
        if self.device.type == "cuda":
            limit_s = min(LIMITS_S[name], self._begin + WHOLE_S - time.monotonic())
        figures, why = limited_call(part, limit_s, f"the {WHOLE_S:.0f} s of all parts were over")
        if why:
            self.report["failed"][name] = why
        else:
            self.report[name] = figures
        print(f"{name}: {time.monotonic() - self._begin:.0f} s", flush=True)
        self._save()
        return figures

    def _save(self) -> None:
        """Save the figures found so far, so that a later failure does not lose them."""
        self.report["seconds"] = round(time.monotonic() - self._begin, 1)
        part = self._file.with_name(self._file.name + ".part")
        write_json(self.report, part)
        part.replace(self._file)


def _measure_flux(
    parts: _Parts,
    preset: str,
    args: argparse.Namespace,
    steps: Callable[[Bench, int], list[dict[str, Any]]],
) -> list[dict[str, Any]]:
    """Measure the parts of a FLUX transformer, and free it; return the figures of `weigh_steps`."""
    device, dtype = parts.device, _dtype_on(parts.device)
    batches = BATCHES[: 2 if device.type == "cuda" else 1]
    benches: list[Bench] = []

    def make_model() -> dict[str, Any]:
        blocks = None if args.blocks is None else tuple(args.blocks)
        bench = Bench(preset, blocks, dtype, device, FORMAT)
        total, free = device_memory(device)
        benches.append(bench)
        of = f"{preset}, {bench.blocks} blocks, {str(dtype).removeprefix('torch.')}"
        weights = sum(p.nbytes for p in bench.model.parameters())
        return {"name": of, "weights": weights, "total": total, "free": free}

    parts.measure("model", make_model)
    if not benches:
        return []
    bench = benches.pop()
    parts.measure("served", partial(time_served_steps, bench, args.repeat))
    parts.measure("loads", partial(time_loads, bench, batches))
    parts.measure("rivals", partial(time_rivals, bench, batches, args.repeat, args.rivals))
    parts.measure("steps", partial(steps, bench, args.repeat))
    parts.measure("attention_ms", partial(time_attention, bench, SERVED, RATIOS))
    parts.measure("placing", partial(time_placing, bench, SERVED[-1:]))
    parts.measure("mixed", partial(time_mixed_steps, bench, args.repeat))
    parts.measure("asked", partial(time_launches, bench))
    return parts.measure("held", partial(weigh_steps, bench)) or []


def _dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32
