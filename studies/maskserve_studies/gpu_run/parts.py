"""The three parts of the run.

- `a`: FLUX Fill in bfloat16, beside diffusers' pipeline as it is, with FirstBlockCache, and on a
  crop.
- `b`: the same in FP8, beside the pipeline compiled, and in FP8 and compiled; then Poisson arrivals
  beside static batches.
- `c`: batch sizes, loads beside recorded steps, SDXL's recorded steps, and klein 4B, with
  `maskserve serve --mps` too.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maskserve_benchmarks.edits.edit import cold_edits, production_edits, with_ratio
from maskserve_benchmarks.perf.inputs import Edit
from maskserve_benchmarks.simulator.workload import draw_gaps
from maskserve_benchmarks.steps.step_rig import NO_TEXT, Bench
from maskserve_common.config_file import config_of
from maskserve_engine.families.specs import counted_work, load_spec
from maskserve_engine.stages.device_probe import peak_rates
from maskserve_studies.gpu_estimates.cards import CARDS
from maskserve_studies.gpu_run.machine import (
    FORMAT,
    served_step,
    time_mixed_steps,
    time_refresh_steps,
    unet_bench,
)
from maskserve_studies.gpu_run.machine_parts import RATIO, as_served, time_loads
from maskserve_studies.gpu_run.random_model import write_random_model
from maskserve_studies.gpu_run.run import Run, StepTimeout
from maskserve_studies.gpu_run.sides import (
    Figures,
    Rival,
    Side,
    in_process,
    poisson,
    static_batches,
    through_triton,
)

PLAIN = "as it is"
MASKSERVE, FIRST, HIT = "maskserve", "maskserve, first edit", "maskserve, hit"
MPS = "maskserve, hit with --mps"
OF_PARTS = {
    "a": ("as it is", "crop and stitch", "FirstBlockCache"),
    "b": ("compiled", "fp8, compiled"),
    "c": ("as it is",),
}
_BUSY = 0.8
"""Rate of Poisson arrivals, as a share of the static batches' edits per second."""


@dataclass(frozen=True, slots=True)
class Source:
    """A model of the run."""

    shapes: Path
    """Folder with its widths."""
    words: Path
    """Folder with tokenizers."""
    settings: Mapping[str, Any]
    """Table `[model]` of its configuration."""
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The extent of the run."""

    fill: Source
    klein: Source
    preset: str
    """Preset of `step_rig`."""
    unet: str | None
    """Preset of `unet_rig`; None: no UNet."""
    at_once: tuple[int, ...] = (1, 8)
    batches: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    loads: tuple[int, ...] = (1, 4)
    rounds: int = 3
    arrivals: int = 24
    limit_s: float = 330.0
    """Seconds of a part."""
    start_s: float = 100.0
    """Seconds in which a model is written, or a side starts."""
    rivals: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: OF_PARTS)
    """Names of rivals, by part."""
    triton: bool = True
    """Whether to start a Triton; else the parts of a worker run in this process."""


def part_a(run: Run, plan: Plan, device: torch.device, folder: Path) -> None:
    with ExitStack() as stack:
        comparison = Comparison(run, plan, plan.fill, folder / "fill", "bf16", device)
        comparison.start(stack, plan.rivals["a"])
        for at_once in plan.at_once:
            comparison.time(at_once)


def part_b(run: Run, plan: Plan, device: torch.device, folder: Path) -> None:
    form = "fp8" if _multiplies_fp8(device) else "int8"
    with ExitStack() as stack:
        comparison = Comparison(run, plan, plan.fill, folder / "fill", form, device)
        comparison.start(stack, plan.rivals["b"])
        for number, at_once in enumerate(plan.at_once):
            comparison.time(at_once)
            if not number:
                run.step("Poisson arrivals beside static batches", 90, comparison.time_arrivals)


def part_c(run: Run, plan: Plan, device: torch.device, folder: Path) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    benches = [run.step("a FLUX", plan.start_s, lambda: Bench(plan.preset, None, dtype, device,
                                                              FORMAT))]  # fmt: skip
    while benches:
        bench = benches.pop()
        if bench is not None:
            run.step("batch sizes", 90, partial(batch_sizes, bench, plan.batches, plan.rounds))
            run.step("loads beside recorded steps", 60, partial(time_loads, bench, plan.loads))
        del bench
    if plan.unet is not None:
        make = partial(unet_bench, plan.unet, dtype, device)
        run.step("SDXL, recorded", 60, lambda: time_mixed_steps(make(), plan.rounds))
        run.step("SDXL, refresh steps", 60, lambda: time_refresh_steps(make(steps=8)))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with ExitStack() as stack:
        room = 20_000_000_000  # two workers
        comparison = Comparison(run, plan, plan.klein, folder / "klein", "bf16", device, room)
        comparison.start(stack, plan.rivals["c"])
        if device.type == "cuda" and plan.triton:
            comparison.start_mps(stack)
        for at_once in plan.at_once:
            comparison.time(at_once)


PARTS: Mapping[str, Callable[[Run, Plan, torch.device, Path], None]] = {
    "a": part_a,
    "b": part_b,
    "c": part_c,
}


class Comparison:
    """Sides that answer the same edits of one model in turn.

    Args:
        run: the part.
        plan: its extent.
        source: the model.
        folder: folder of its random weights, which are written if it is not there.
        form: form of maskserve's weights.
        device: the device.
        room: bytes of `[cache] budget_bytes` of each worker on a GPU, which the sides share.
    """

    def __init__(
        self,
        run: Run,
        plan: Plan,
        source: Source,
        folder: Path,
        form: str,
        device: torch.device,
        room: int = 40_000_000_000,
    ) -> None:
        self.run, self.plan, self.source = run, plan, source
        self.folder, self.form, self.device, self.room = folder, form, device, room
        self.sides: dict[str, Side] = {}
        size = source.settings["native_resolution"]
        count = max(plan.arrivals, *plan.at_once)
        self.edits = with_ratio(production_edits(size, count, 4), size, RATIO)

    def start(self, stack: ExitStack, rivals: Sequence[str]) -> None:
        """Start the sides. Rivals come first, so that the worker counts their memory, and share
        their weights. Every side answers edits that are not timed: they compile, record and prime.
        The pipeline as it is stands in for rivals that cannot.
        """
        source, limit_s, step = self.source, self.plan.start_s, self.run.step
        step(
            f"random weights of {source.shapes.name}",
            limit_s,
            lambda: write_random_model(
                source.shapes, source.words, self.folder, dict(source.settings), self.device
            ),
        )
        plain: Rival | None = None
        if rivals:
            plain = step(f"start: {PLAIN}", limit_s, partial(Rival, self.folder, PLAIN))
        for name in rivals if plain is not None else ():
            rival: Rival | None = plain
            if name != PLAIN:
                rival = step(f"start: {name}", limit_s, partial(Rival, self.folder, name, plain))
            if rival is not None:
                self.sides[f"diffusers, {name}"] = rival
        for name, way in self._ways(stack).items():
            way_s = max(limit_s, self.run.left_s() - limit_s)  # the other way has as much time
            side = step(name, way_s, partial(stack.enter_context, way))
            if side is not None:
                self.sides = {MASKSERVE: side, **self.sides}
                break
        for name, side in list(self.sides.items()):
            share_s = min(limit_s, self.run.left_s() / 4)  # compilers may take all of it
            if step(f"before: {name}", share_s, partial(self._warm, side)) is None:
                del self.sides[name]
        if plain is not None and not any(isinstance(x, Rival) for x in self.sides.values()):
            self.sides[f"diffusers, {PLAIN}"] = plain

    def start_mps(self, stack: ExitStack) -> None:
        """Start a worker more, whose processes share the GPU by NVIDIA's service."""
        files = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        way = through_triton(self.folder, files / "w", self._tables(), mps=True)
        side = self.run.step(f"start: {MPS}", self.plan.start_s, partial(stack.enter_context, way))
        if side is not None and self.run.step(
            f"before: {MPS}", self.plan.start_s, partial(self._warm, side)
        ):
            self.sides[MPS] = side

    def _tables(self) -> dict[str, Any]:
        """Return the configuration of maskserve's workers."""
        tables: dict[str, Any] = {"model": {"weights": self.form}}
        if self.device.type == "cuda":
            tables["cache"] = {"budget_bytes": self.room}
        return tables

    def _ways(self, stack: ExitStack) -> dict[str, Any]:
        """Return the ways to serve, the preferred one first."""
        tables = self._tables()
        files = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ways = {
            "start: maskserve through Triton": through_triton(self.folder, files / "w", tables),
            "start: maskserve in this process": in_process(self.folder, tables),
        }
        return dict(list(ways.items())[0 if self.plan.triton else 1 :])

    def _warm(self, side: Side) -> bool:
        for image in sorted({edit.image for edit in self.edits}):
            side.prime(image)
        for at_once in self.plan.at_once:
            side.run(self._edits(min(self.source.steps), at_once), at_once)
        return True

    def _edits(self, steps: int, count: int) -> list[Edit]:
        return [
            replace(edit, settings={**edit.settings, "num_inference_steps": steps})
            for edit in self.edits[:count]
        ]

    def time(self, at_once: int) -> None:
        """Time whole edits by their steps; several at once begin with the fewest steps."""
        for steps in self.source.steps if at_once == 1 else sorted(self.source.steps):
            self.run.step(
                f"{self.form}, {steps} steps, {at_once} at once",
                self.plan.limit_s,
                partial(self._time_case, steps, at_once),
            )

    def _time_case(self, steps: int, at_once: int) -> Figures:
        """Return the median edits per second of each side, and the share of what the counted work
        allows. The sides take turns, for `plan.rounds` rounds or as many as the time allows: a
        limit that cuts a round short leaves what was measured.
        """
        edits, runs = self._edits(steps, at_once), dict[str, list[Figures]]()
        end_s, figures = self.run.left_s() / 2, Figures()
        try:
            for number in range(self.plan.rounds):
                begin_s = self.run.left_s()
                self._turn(edits, at_once, number, runs)
                if 2 * self.run.left_s() - begin_s < end_s:
                    break
        except StepTimeout as error:
            if not runs:
                raise
            figures["cut"] = str(error)
        for name, of_side in runs.items():
            figures[name] = _median(of_side) | self._limit(name, of_side[0], steps)
        return figures | {"times": _gains(figures)}

    def _turn(
        self, edits: Sequence[Edit], at_once: int, number: int, runs: dict[str, list[Figures]]
    ) -> None:
        for name, side in self.sides.items():
            if name == MASKSERVE:
                if not number:
                    side.run(edits, at_once)  # primes for this number of steps
                steps = edits[0].settings["num_inference_steps"]
                fresh = cold_edits(edits, 1000 * steps + 100 * at_once + number)
                runs.setdefault(FIRST, []).append(side.run(fresh, at_once))
            timed = side.run(edits, at_once)
            runs.setdefault(HIT if name == MASKSERVE else name, []).append(timed)

    def _limit(self, name: str, figures: Figures, steps: int) -> Figures:
        side = self.sides.get(name)
        form = side.form if isinstance(side, Rival) else self.form
        return limit_of(self.folder, figures, steps, form, self.device)

    def time_arrivals(self) -> Figures:
        """Return mean and P95 seconds of the same Poisson arrivals at maskserve, and at diffusers'
        pipeline in static batches. The rate is a share of the rate of full static batches.
        """
        rivals = [side for side in self.sides.values() if isinstance(side, Rival)]
        if MASKSERVE not in self.sides or not rivals:
            raise RuntimeError("a side did not start")
        steps = sorted(self.source.steps)[len(self.source.steps) // 2]
        edits, most = self._edits(steps, self.plan.arrivals), max(self.plan.at_once)
        rate = _BUSY * float(rivals[-1].run(edits[:most], most)["edits_per_s"])
        gaps = draw_gaps(rate, len(edits), np.random.default_rng(0)).tolist()
        seconds = {
            "maskserve": poisson(self.sides[MASKSERVE], edits, gaps),
            "static batches": static_batches(rivals[-1].batch, edits, gaps, most),
        }
        figures = {
            name: {
                "mean_s": round(statistics.mean(of_side), 3),
                "p95_s": round(float(np.percentile(of_side, 95, method="nearest")), 3),
            }
            for name, of_side in seconds.items()
        }
        return {"edits_per_s": round(rate, 4), "edits": len(edits), "steps": steps, **figures}


def _gains(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the gains of maskserve over each rival."""
    rates = {name: item["edits_per_s"] for name, item in figures.items() if name != "cut"}
    return {
        f"{edit} beside {name}": round(rates[edit] / rate, 3)
        for edit in (FIRST, HIT)
        if edit in rates
        for name, rate in rates.items()
        if name not in (FIRST, HIT)
    }


def _median(runs: Sequence[Figures]) -> Figures:
    rate = statistics.median(float(item["edits_per_s"]) for item in runs)
    reported = ("stages_ms", "cache", "dense_steps", "side")
    return {
        "edits_per_s": round(rate, 4),
        "s_per_edit": round(1 / rate, 4),
        "rounds": len(runs),
        **{name: runs[-1][name] for name in reported if name in runs[-1]},
    }


def limit_of(model: Path, figures: Figures, steps: int, form: str, device: torch.device) -> Figures:
    """Return FLOPs, bytes of weights and least seconds of an edit's steps, and the least seconds as
    a share of those measured (`of_limit`). FirstBlockCache counts as dense, because nothing counts
    the blocks that it leaves out. Encoders and VAE are left out, so no side reaches 1.
    """
    spec, config = load_spec(str(model)), config_of({"model": {"path": str(model)}})
    size, text = config.model.native_resolution, config.model.max_sequence_length
    cropped = figures.get("side")
    latents = int((cropped or size) // spec.vae_scale_factor)
    work = counted_work(spec, latents, latents)
    is_ours = cropped is None
    dense_count = figures.get("dense_steps", 0) if is_ours else steps
    flops = {
        "dense": work.step_flops([work.row_at(1.0, text)], "dense"),
        "kv": work.step_flops([work.row_at(RATIO, text)], "kv"),
    }
    of_weights = 1.0 * sum(file.stat().st_size for file in model.glob("transformer/*.safetensors"))
    of_weights *= 1.0 if form == "bf16" else 0.5
    peak, bandwidth = peaks(device, form)
    count = {"dense": dense_count, "kv": steps - dense_count}
    least = sum(
        count[kind] * max(flops[kind] / peak, of_weights / bandwidth if bandwidth else 0.0)
        for kind in flops
    )
    return {
        "tflops": round(sum(count[kind] * flops[kind] for kind in flops) / 1e12, 4),
        "weights_gb": round(of_weights * steps / 1e9, 3),
        "least_s": round(least, 4),
        "of_limit": round(least * float(figures["edits_per_s"]), 4),
    }


def peaks(device: torch.device, form: str) -> tuple[float, float | None]:
    """Return FLOP/s and bytes per second of a device: by its data sheet, or by its properties and
    without bytes.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for card in CARDS:
            if card.name.split()[-1] in name or card.name.split()[0] in name:
                return (card.fp8 if form == "fp8" else card.half), card.bytes_per_s
        return peak_rates(device, torch.bfloat16).product_flops, None
    return peak_rates(device, torch.float32).product_flops, None


def batch_sizes(bench: Bench, batches: Sequence[int], rounds: int) -> list[Figures]:
    """Return milliseconds of a step by the number of its rows, in turn with dense steps: rows that
    read a template, and rows between refresh steps. `rows_per_s` is what the steps answer.
    """
    weights, served = bench.weights, as_served(bench)
    bench.fill_entry("kv")
    figures = []
    for batch in batches:
        for kind in ("kv", NO_TEXT):
            step = served_step(bench, served, batch, kind, RATIO, rounds)
            figures.append({**step, "rows_per_s": round(1e3 * batch / step["ms"], 2)})
    bench.weights, bench.batch = weights, None
    return figures


def _multiplies_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
