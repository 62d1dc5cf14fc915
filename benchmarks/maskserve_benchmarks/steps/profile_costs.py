"""Measure steps on one device of a worker and on several, and fit costs for `[engine] costs`.
Compare the predictions of a worker that uses them with its steps.

    python scripts/bench profile_costs --devices 2 --out costs.json

A worker of several devices (a process of one thread each, or a GPU) steps edits of some sizes,
dense and cached, in gangs of every degree, with all devices busy. The command fits the law of
`planning/degree_costs.py` to these steps: seconds from the FLOPs, bytes and calls of a device. A
second worker starts with the fitted costs, predicts the steps of edits of other sizes, and then
takes these steps.

`--clock cpu` counts the processor time of the ranks per device instead. It tests the law on a
machine with other load. A profile for a worker needs the wall clock.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image
from scipy.optimize import nnls

from maskserve_benchmarks.edits.direct import Direct, Edit
from maskserve_benchmarks.edits.edit import large_model
from maskserve_benchmarks.machine import machine
from maskserve_benchmarks.reports import about, table, write_json
from maskserve_common.config import Config
from maskserve_common.config_file import config_of, read_toml
from maskserve_common.line_fit import Line
from maskserve_engine.base.job import EditJob
from maskserve_engine.gangs.executor import GangExecutor
from maskserve_engine.planning.cost_profile import CostProfile
from maskserve_engine.planning.degree_costs import (
    DEGREES,
    ExchangeCosts,
    busiest,
    calls,
    sent_bytes,
    uneven_flops,
)
from maskserve_engine.planning.flops import ModelWork, RowTokens
from maskserve_engine.scheduling.gangs.scheduler import GangScheduler
from maskserve_engine.scheduling.gangs.work import GangPlan, Work
from maskserve_engine.scheduling.step_scheduler import Run

_UNSETTLED = 2
"""Number of an edit's first steps, which prepare kernels and vectors."""
_PREDICTION_S = 60.0
"""Seconds within which a worker must predict an edit's step time."""
_LEAST_S = 1e-15
"""Least seconds per byte: the fit gives 0 if it sees no exchange."""


@dataclass(frozen=True, slots=True)
class Point:
    """Measurements of edits of one size at one degree."""

    side: int
    cached: bool
    degree: int
    flops: float
    """FLOPs of the device that computes most."""
    sent: float
    """Bytes that the busiest device sends or gets."""
    calls: int
    seconds: float
    """Seconds of a step without disturbance: the mean over the faster half of the steps."""
    mean: float
    """Mean seconds over all steps."""
    predicted: float
    """Seconds that the worker predicted before the first step."""

    @property
    def error(self) -> float:
        """Return the relative difference of the prediction from the measurement."""
        return self.predicted / self.seconds - 1.0


class FixedGangs:
    """A `GangPolicy` with given devices: each edit runs on the devices listed under its name. With
    an empty list it waits; without a list it runs on the first device.
    """

    def __init__(self) -> None:
        self.devices: dict[str, tuple[int, ...]] = {}
        self.predicted: dict[str, Future[tuple[float, ...]]] = {}
        """Seconds of a step by degree, from the worker's ticket."""

    def decide(self, now: float, works: Sequence[Work]) -> GangPlan:
        busy = sum({work.gang for work in works if work.until is not None})
        runs = []
        for work in works:
            name = work.ticket.request_id
            if name in self.predicted:
                self.predicted.pop(name).set_result(work.ticket.seconds)
            devices = self.devices.get(name, (0,))
            if not devices:
                continue
            gang = sum(1 << device for device in devices)
            if work.until is None and not gang & busy:
                busy |= gang
                runs.append(Run((work.ticket,), devices))
        return GangPlan(tuple(runs))


class Worker:
    """A worker whose edits run on given devices.

    Args:
        config: configuration of the worker.
        by_processor: count the ranks' processor time instead of elapsed time.
    """

    def __init__(self, config: Config, *, by_processor: bool) -> None:
        self.policy, self._numbers = FixedGangs(), itertools.count()
        self._devices = config.engine.devices
        self._parts = Direct(
            config,
            lambda rows, waiting, share: GangScheduler(self.policy, self._devices, rows, waiting),
        )
        executor = self._parts.engine.executor
        assert isinstance(executor, GangExecutor)
        self.exchange = executor.ranks.exchange
        self._by_processor = by_processor
        below = psutil.Process().children(recursive=True)
        self._ranks = [
            process for process in below if "maskserve_engine.gangs.rank" in process.cmdline()
        ]

    def close(self) -> None:
        self._parts.engine.close(10.0)

    def costs(self) -> Any:
        """Return the worker's current cost model."""
        return self._parts.engine.runner.planner.costs.model

    def edits(self, side: int, count: int, steps: int, *, cached: bool) -> list[EditJob]:
        """Return edits of one picture, with a tenth of it masked."""
        rng = np.random.default_rng(side)
        mask = np.zeros((side, side), dtype=np.uint8)
        mask[: side // 4, : side * 2 // 5] = 255
        edit: Edit = (_png(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)), _png(mask), "")
        settings = {
            "num_inference_steps": steps,
            "progress": True,
            "cache": "require" if cached else "off",
        }
        jobs = self._parts.jobs([edit] * count, settings)
        names = [f"profile-{next(self._numbers)}" for _ in jobs]
        return [
            replace(job, request=replace(job.request, request_id=name))
            for job, name in zip(jobs, names, strict=True)
        ]

    def predicted(self, side: int, *, cached: bool) -> tuple[float, ...]:
        """Return the seconds of a step by degree that the worker predicts now."""
        [job] = self.edits(side, 1, 2, cached=cached)
        name = job.request.request_id
        self.policy.devices[name] = ()
        future = self.policy.predicted[name] = Future()
        self._parts.engine.submit(job, lambda event: None)
        seconds: tuple[float, ...] = future.result(_PREDICTION_S)
        self._parts.engine.cancel(name)
        return seconds

    def measure(
        self, side: int, degree: int, steps: int, predicted: float, *, cached: bool
    ) -> Point:
        """Run edits of one size on all devices, as many at once as there are such gangs."""
        jobs = self.edits(side, self._devices // degree, steps, cached=cached)
        for number, job in enumerate(jobs):
            first = number * degree
            self.policy.devices[job.request.request_id] = tuple(range(first, first + degree))
        clock = self._processor_s if self._by_processor else None
        ended = self._parts.run(jobs, clock) if clock else self._parts.run(jobs)
        step_s = [np.diff(times[_UNSETTLED:]) for times in ended]
        all_step_s = np.sort(np.concatenate(step_s))
        mean = seconds = float(all_step_s.mean())
        if not self._by_processor:  # other load on the machine only makes steps longer
            seconds = float(all_step_s[: (len(all_step_s) + 1) // 2].mean())
        work, row = self._work_of(jobs[0], cached=cached)
        kind = "kv" if cached else "dense"
        return Point(
            side,
            cached,
            degree,
            work.step_flops([row], kind) / degree + uneven_flops(work, row, kind, degree),
            sent_bytes(work, row, degree, self.exchange.value_bytes) * busiest(work.heads, degree),
            calls(work, degree),
            seconds,
            mean,
            predicted,
        )

    def prime(self, side: int) -> None:
        self._parts.run(self.edits(side, 1, 2, cached=True))

    def _work_of(self, job: EditJob, *, cached: bool) -> tuple[ModelWork, RowTokens]:
        adapter = self._parts.engine.adapter
        _, height, width = job.moments.shape
        tokens = adapter.tokens(job)
        active = float(tokens.active if cached else tokens.total)
        text = float(len(job.conditioning["prompt_embeds"]))
        return adapter.work(height, width), RowTokens((active,), text)

    def _processor_s(self) -> float:
        """Return the processor seconds of all ranks so far, per device."""
        total = 0
        for rank in self._ranks:
            for thread in Path(f"/proc/{rank.pid}/task").iterdir():
                total += int((thread / "schedstat").read_text().split()[0])
        return total * 1e-9 / self._devices


def fit_costs(points: Sequence[Point]) -> tuple[Line, ExchangeCosts]:
    """Fit the cost law to the measurements: least squares of relative errors, with no negative
    coefficient.
    """
    seconds = np.array([point.seconds for point in points])
    counted = np.array([(1.0, p.flops, p.sent, p.calls) for p in points])
    # Scale the columns to similar size: FLOPs and calls differ by ten powers of ten.
    scale = counted.max(axis=0)
    scale[scale == 0.0] = 1.0
    coefficients, _ = nnls(counted / scale / seconds[:, None], np.ones(len(points)))
    fixed, per_flop, per_byte, call = map(float, coefficients / scale)
    errors = counted @ (coefficients / scale) - seconds
    r2 = 1.0 - float(errors @ errors) / float(np.square(seconds - seconds.mean()).sum())
    line = Line(fixed, per_flop, r2, len(points))
    return line, ExchangeCosts(1.0 / max(per_byte, _LEAST_S), call)


def measure_all(worker: Worker, sides: Sequence[int], args: argparse.Namespace) -> list[Point]:
    """Measure all sizes, kinds and degrees, in changing order; each point is the median of the
    rounds.
    """
    for side in sides:
        worker.prime(side)
    kinds = list(itertools.product(sides, (False, True)))
    predicted = {case: worker.predicted(case[0], cached=case[1]) for case in kinds}
    cases = [(*case, exponent) for case in kinds for exponent in range(args.devices.bit_length())]
    rounds: list[list[Point]] = [[] for _ in cases]
    rng = np.random.default_rng(args.seed)
    for _ in range(args.rounds):
        for number in rng.permutation(len(cases)):
            side, cached, exponent = cases[number]
            predicted_s = predicted[side, cached][exponent]
            rounds[number].append(
                worker.measure(side, 1 << exponent, args.steps, predicted_s, cached=cached)
            )
    return [
        replace(
            samples[0],
            seconds=statistics.median(point.seconds for point in samples),
            mean=statistics.median(point.mean for point in samples),
        )
        for samples in rounds
    ]


def _png(pixels: Any) -> bytes:
    out = BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def _table(points: Sequence[Point]) -> str:
    rows = [
        (
            point.side,
            "cached" if point.cached else "dense",
            point.degree,
            f"{1e3 * point.seconds:.1f}",
            f"{1e3 * point.predicted:.1f}",
            f"{100 * point.error:+.0f} %",
        )
        for point in points
    ]
    return table(("side", "row", "devices", "ms", "predicted, ms", "error"), rows)


def _summary(points: Sequence[Point]) -> dict[str, float]:
    """Return how far the predictions differ from the measurements, relative."""
    errors = [abs(point.error) for point in points]
    return {"median": round(statistics.median(errors), 3), "most": round(max(errors), 3)}


def worker_config(args: argparse.Namespace, model: Path, costs: str) -> Config:
    """Return the configuration of the profiled worker; its cached rows read their entries whatever
    that costs.
    """
    tables = read_toml(args.config) if args.config else {}
    engine = {"devices": args.devices, "policy": "deadline", "costs": costs, "warm_up": False}
    return config_of(
        {
            **tables,
            "model": {**tables.get("model", {}), "path": str(model)},
            "engine": {**tables.get("engine", {}), **engine},
            "cache": {**tables.get("cache", {}), "plan": "fixed", "dense_above_ratio": 1.0},
        }
    )


def profile_worker(
    args: argparse.Namespace, model: Path, sides: Sequence[int], costs: str = ""
) -> tuple[list[Point], CostProfile]:
    """Return the measurements of a worker of this model, and the cost law fitted to them.

    Args:
        args: arguments of the command.
        model: folder of the model.
        sides: sides of the pictures.
        costs: cost file with which the worker starts; empty: an estimate.
    """
    by_processor = args.clock == "cpu"
    worker = Worker(worker_config(args, model, costs), by_processor=by_processor)
    try:
        points = measure_all(worker, sides, args)
        line, exchange = fit_costs(points)
        measured_costs = replace(worker.costs(), compute=line, source="measured")
    finally:
        worker.close()
    value_bytes = worker.exchange.value_bytes
    return points, CostProfile(measured_costs, replace(exchange, value_bytes=value_bytes))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder; none: FLUX Fill of width 512, random")
    parser.add_argument("--config", type=Path, help="TOML file of the worker")
    parser.add_argument("--devices", type=int, default=2, choices=DEGREES[1:])
    parser.add_argument("--sides", type=int, nargs="+", default=[64, 96, 128], help="pixels")
    parser.add_argument("--fresh", type=int, nargs="*", default=[80, 112], help="sides to predict")
    parser.add_argument("--steps", type=int, default=12, help="of each edit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the profile here, for [engine] costs")
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args(arguments)
    if args.steps < _UNSETTLED + 3:
        parser.error(f"--steps: accepted: {_UNSETTLED + 3} or more")
    if args.out and args.clock == "cpu":
        parser.error("--out: a worker's profile is by the wall clock; leave --clock out")
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        model = args.model or large_model(folder / "model")
        file = folder / "costs.json"
        report: dict[str, Any] = about(machine())
        points, profile = profile_worker(args, model, args.sides)
        file.write_text(profile.text() + "\n", encoding="utf-8")
        if args.out:
            args.out.write_text(profile.text() + "\n", encoding="utf-8")
        line, exchange = profile.costs.compute, profile.exchange
        print(
            f"{1e3 * line.fixed:.2f} ms + {1e12 * line.per_unit:.3f} s/TFLOP + "
            f"{1e9 / exchange.bytes_per_second:.3g} ns/B + {1e6 * exchange.call_seconds:.0f} us "
            f"per call; R2 {line.r2:.4f}, {line.samples} points"
        )
        report |= {"profile": json.loads(profile.text()), "measured": _figures(points)}
        report |= {"summary": {"estimated": _summary(points)}}
        if args.fresh:
            fresh, _ = profile_worker(args, model, args.fresh, str(file))
            print(_table(fresh))
            report |= {"fresh": _figures(fresh)}
            report["summary"]["profiled"] = _summary(fresh)
            print(json.dumps(report["summary"]))
    write_json(report, args.json)
    return 0


def _figures(points: Sequence[Point]) -> list[dict[str, Any]]:
    return [{**asdict(point), "error": round(point.error, 3)} for point in points]


if __name__ == "__main__":
    raise SystemExit(main())
