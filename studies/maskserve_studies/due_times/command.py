"""Measure the share of edits that are in time on a real worker of two devices, and compare it with
the simulator.

    python scripts/bench due_times --json docs/benchmarks/due_times.json
    python scripts/bench due_times --mix uniform --json due_times-uniform.json

The edits are dense edits of FLUX Fill of width 512 (random weights) in three sizes. With `--mix`
they are text to image by FLUX.1 of that width, in the sizes of TetriServe's mix divided by eight
(32² to 256²), with due times in its proportions (§6.1) and times its scales: at 1.0 the largest
picture is in time on both devices only. They come by a Poisson process to a real Triton. A device
is a process of one thread. First the worker is profiled (`profile_costs`): a step of each size on
one device with both busy, and on two devices. Servers start with that profile (`[engine] costs`).
Then the parts of an edit before and after its steps are measured.

In each round, at each load and scale, the same arrivals go to all systems in turn: workers with the
policy `deadline` (with `--mix` also `rounds`), with one device for each edit (`fixed1`: `spread`, a
row per device) and with both (`fixed2`: `together`, real with `--mix` only), and the simulator
(`shared_cores.py`) with the measured times. It has the schedulers of the servers, an encoder and a
decoder that take edits one by one, and the machine's cores for all of them.

The speed of a shared machine changes by a third within minutes. So products of a step's size are
timed around the profile and around each run, and the simulator's times scale with them.

`apart` is real less simulated, in points, and `error` is its standard error over the rounds. One of
30 edits is 3.3 points, so a single round says nothing about a bar of 5.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tomli_w
import torch

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.edits.edit import large_model
from maskserve_benchmarks.machine import machine, stolen_s
from maskserve_benchmarks.perf.inputs import Edit, InputOptions, find_photos, make_edits
from maskserve_benchmarks.perf.server import Server, own_workers
from maskserve_benchmarks.simulator.workload import draw_gaps
from maskserve_benchmarks.steps import profile_costs
from maskserve_client import Client, MaskserveError
from maskserve_common.config import EngineConfig, cores
from maskserve_common.contracts.request import EditKind
from maskserve_engine.scheduling.policies import policy_of
from maskserve_engine.scheduling.step_scheduler import SchedulingPolicy, Ticket
from maskserve_studies.deadlines import gangs
from maskserve_studies.due_times.shared_cores import Machine, StagedEdit

Figures = dict[str, Any]
DEVICES = 2
_PRODUCTS = 400
_BEFORE = ("preprocess", "encode", "prepare")
CONFIGS: Mapping[str, dict[str, Any]] = {
    "deadline": {"devices": DEVICES, "policy": "deadline"},
    "rounds": {"devices": DEVICES, "policy": "rounds", "round_steps": 2},
    "fixed1": {"devices": DEVICES, "policy": "spread", "max_rows": 1},
    "fixed2": {"devices": DEVICES, "policy": "together"},
}
"""Configurations of servers by the policy's name."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of the parts of an edit, for one picture size."""

    step: tuple[float, float]
    """Seconds of a step on one device and on two."""
    before: float
    """Seconds from sending to the scheduler."""
    after: float
    """Seconds from the last step to the answer."""
    shared: float = 0.0
    """The part of a step's seconds that does not depend on its rows."""

    def slower(self, times: float) -> Times:
        """These times on a machine that takes this many times as long."""
        single_s, pair_s = self.step
        scaled = (self.before * times, self.after * times, self.shared * times)
        return Times((single_s * times, pair_s * times), *scaled)


AllTimes = Mapping[int, Times]
"""Times by the side of the picture."""


class Point(NamedTuple):
    """A load, as a share of the rate that two devices reach when each edit keeps one device, and a
    factor of the due times.
    """

    load: float
    scale: float = 1.0

    @property
    def name(self) -> str:
        return str(self.load) if self.scale == 1.0 else f"{self.load}, due times x {self.scale}"


@dataclass(frozen=True, slots=True)
class Problem:
    """The edits of a measurement and the servers that take them."""

    shares: Mapping[int, float]
    """Shares of the edits by the picture's side."""
    patience: Callable[[AllTimes], dict[int, float]]
    """Returns the seconds per step within which an edit is in time, by side."""
    steps: int
    points: tuple[Point, ...]
    servers: tuple[str, ...]
    kind: EditKind = "inpaint"
    prompts: int = 8
    """Number of different edits of each size."""


DUE = {64: 4.0, 96: 2.0, 128: None}
"""Due times of masked edits by the picture's side, as a multiple of the edit's steps on one device.
The time outside the steps is added. None: halfway between the steps on one device and on both. The
largest edits are then in time only on both devices, as TetriServe's are.
"""
_SCALED = 8
"""TetriServe's sides over ours."""
_SCALES = (1.0, 1.5)


def halfway(times: Times) -> float:
    """Return seconds per step that both devices keep, and one does not."""
    return statistics.mean(times.step)


def masked_patience(times: AllTimes) -> dict[int, float]:
    return {
        side: halfway(of_side) if (multiple := DUE[side]) is None else multiple * of_side.step[0]
        for side, of_side in times.items()
    }


def tetriserve_patience(times: AllTimes) -> dict[int, float]:
    largest = max(gangs.SIZES)
    unit = halfway(times[largest // _SCALED]) / gangs.DUE[largest]
    return {side: unit * gangs.DUE[side * _SCALED] for side in times}


MASKED = Problem(
    dict.fromkeys(DUE, 1 / len(DUE)),
    masked_patience,
    steps=16,
    points=(Point(0.5), Point(0.8), Point(1.2)),
    servers=("deadline", "fixed1"),
)


def tetriserve(mix: str, scales: Sequence[float]) -> Problem:
    """Return TetriServe's problem at small scale."""
    shares = gangs.size_shares(mix)
    return Problem(
        {side // _SCALED: float(n) for side, n in zip(gangs.SIZES, shares, strict=True)},
        tetriserve_patience,
        steps=8,
        points=tuple(Point(0.6, scale) for scale in scales),
        servers=tuple(CONFIGS),
        kind="generate",
        prompts=3,
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mix", choices=gangs.MIXES, help="text to image in TetriServe's sizes")
    parser.add_argument(
        "--scales", type=float, nargs="+", default=_SCALES, help="factors of --mix's due times"
    )
    parser.add_argument("--edits", type=int, default=30, help="of each point in each round")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args(arguments)
    least = len(gangs.SIZES if args.mix else DUE)
    if args.edits < least:
        parser.error(f"--edits: accepted: {least} or more")
    if args.rounds < 2:
        parser.error("--rounds: accepted: 2 or more, as they tell how far chance goes")
    return args


def product_s() -> float:
    """Seconds of matrix products of a step's size, on as many cores at once as there
    are devices.
    """
    torch.set_num_threads(1)
    tokens, weights = torch.randn(80, 512), torch.randn(512, 2048)
    out = [torch.empty(80, 2048) for _ in range(DEVICES)]

    def all_of(number: int) -> float:
        begin = time.perf_counter()
        for _ in range(_PRODUCTS):
            torch.mm(tokens, weights, out=out[number])
        return time.perf_counter() - begin

    with ThreadPoolExecutor(DEVICES) as pool:
        return statistics.mean(pool.map(all_of, range(DEVICES)))


def edits_by_side(problem: Problem) -> dict[int, list[Edit]]:
    photos = find_photos(CHECKOUT / "assets")
    settings = {"cache": "off", "num_inference_steps": problem.steps}
    return {
        side: make_edits(
            InputOptions(side, problem.prompts, 4, kind=problem.kind, settings=settings), photos
        )
        for side in problem.shares
    }


def send(server: Server, edit: Edit, due_ms: int) -> tuple[float, dict[str, Any]]:
    """Seconds until the answer, and its META. META is empty if the edit was refused."""
    begin = time.perf_counter()
    with Client(server.grpc) as client:
        try:
            result = client.edit(
                edit.image or None,
                edit.mask or None,
                edit.prompt,
                **edit.settings,
                deadline_ms=due_ms,
                on_late="finish",
            )
        except MaskserveError:
            return time.perf_counter() - begin, {}
    return time.perf_counter() - begin, result.meta


def profile_steps(model: Path, file: Path, sides: Sequence[int]) -> dict[int, Times]:
    """Profile steps of each size at each degree with all devices busy. The profile goes
    to `file`.
    """
    args = profile_costs.parse(["--devices", str(DEVICES), "--sides", *map(str, sides)])
    points, profile = profile_costs.profile_worker(args, model, args.sides)
    file.write_text(profile.text() + "\n", encoding="utf-8")
    # Mean steps, because the servers' edits also meet the machine's slow moments.
    seconds = {(p.side, p.degree): p.mean for p in points if not p.cached}
    fixed = profile.costs.compute.fixed
    return {
        side: Times(
            (seconds[side, 1], seconds[side, 2]),
            0.0,
            0.0,
            min(fixed, *(seconds[side, k] for k in (1, 2))),
        )
        for side in sides
    }


def with_stages(
    server: Server, times: AllTimes, edits: Mapping[int, Sequence[Edit]]
) -> dict[int, Times]:
    """The times with the parts of an edit before and after its steps. Edits run one at a time,
    and twice. The medians leave out the first run, which encodes the prompts.
    """
    measured_times = {}
    for side, side_edits in edits.items():
        answers = [send(server, edit, 60_000) for edit in (*side_edits, *side_edits)][
            len(side_edits) :
        ]
        prepare_times, answer_times = [], []
        for seconds, meta in answers:
            stages = {name: ms / 1e3 for name, ms in meta["timings_ms"].items()}
            prepare_times.append(sum(stages[name] for name in _BEFORE))
            answer_times.append(seconds - prepare_times[-1] - stages["queue"] - stages["denoise"])
        measured_times[side] = replace(
            times[side],
            before=statistics.median(prepare_times),
            after=statistics.median(answer_times),
        )
    return measured_times


def sides(count: int, shares: Mapping[int, float], rng: np.random.Generator) -> list[int]:
    """Picture sides in the numbers of their shares, shuffled."""
    at = np.searchsorted(np.cumsum(list(shares.values())), (np.arange(count) + 0.5) / count)
    names = list(shares)
    return [names[index] for index in rng.permutation(at)]


def run_real(
    server: Server,
    edits: Mapping[int, Sequence[Edit]],
    arrivals: Sequence[tuple[float, int]],
    due: Mapping[int, float],
) -> Figures:
    """Send edits at their arrival times and return the share in time."""
    with ThreadPoolExecutor(len(arrivals)) as pool:
        start, calls = time.perf_counter(), []
        for number, (at, side) in enumerate(arrivals):
            time.sleep(max(0.0, start + at - time.perf_counter()))
            edit = edits[side][number % len(edits[side])]
            calls.append((side, pool.submit(send, server, edit, round(1e3 * due[side]))))
        met = [(side, call.result()[1].get("slo") == "met") for side, call in calls]
    return in_time(met)


def simulate(
    policy: SchedulingPolicy,
    times: AllTimes,
    steps: int,
    arrivals: Sequence[tuple[float, int]],
    due: Mapping[int, float],
    cores: float,
) -> Figures:
    """Simulate the same edits in virtual time."""
    edits = []
    for number, (at, side) in enumerate(arrivals):
        side_times, tokens = times[side], (side // 16) ** 2
        ticket = Ticket(
            f"{side}-{number}",
            steps,
            tokens,
            tokens,
            at,
            due=at + due[side] - side_times.after,
            seconds=side_times.step,
            shared=side_times.shared,
        )
        edits.append(StagedEdit(ticket, side_times.before, side_times.after))
    answered = Machine(policy, DEVICES, cores).run(edits)
    return in_time(
        [
            (side, answered[f"{side}-{number}"] <= at + due[side])
            for number, (at, side) in enumerate(arrivals)
        ]
    )


def policies() -> dict[str, SchedulingPolicy]:
    """The policies of the servers, by name."""
    by_name = {}
    for name, table in CONFIGS.items():
        engine = EngineConfig(**table)
        rows, waiting = engine.max_rows, engine.max_waiting
        by_name[name] = policy_of(engine).make(engine, rows, waiting, 0.0)
    return by_name


def in_time(outcomes: Sequence[tuple[int, bool]]) -> Figures:
    """Shares of the edits in time: of all, and of each side of the pictures."""

    def share(flags: Sequence[bool]) -> float:
        return round(sum(flags) / max(1, len(flags)), 3)

    by_side = {
        str(side): share([is_met for edit_side, is_met in outcomes if edit_side == side])
        for side in sorted({side for side, _ in outcomes})
    }
    return {"sar": share([is_met for _, is_met in outcomes]), "by_side": by_side}


def run(
    problem: Problem,
    servers: Mapping[str, Server],
    times: AllTimes,
    product: float,
    args: argparse.Namespace,
) -> Figures:
    """Run all rounds.

    Args:
        problem: the problem to measure.
        servers: by policy.
        times: of steps, as profiled.
        product: `product_s` at the time of the profile.
        args: of the command.
    """
    edits = edits_by_side(problem)
    times = with_stages(servers["deadline"], times, edits)
    step_s = problem.patience(times)
    work = sum(
        share * problem.steps * times[side].step[0] for side, share in problem.shares.items()
    )
    report: Figures = {
        "times": {
            str(side): {
                "step_ms": [round(1e3 * s, 1) for s in t.step],
                "before_ms": round(1e3 * t.before),
                "after_ms": round(1e3 * t.after),
                "due_ms": round(1e3 * (t.before + t.after + problem.steps * step_s[side])),
            }
            for side, t in times.items()
        },
        "rounds": [],
    }
    say(report["times"])
    for number in range(args.rounds):
        turns = list(servers.items())[:: 1 if number % 2 else -1]
        for point in problem.points:
            rng, rate = np.random.default_rng((args.seed, number)), point.load * DEVICES / work
            times_s = np.cumsum(draw_gaps(rate, args.edits, rng))
            drawn = sides(args.edits, problem.shares, rng)
            arrivals = [(float(t), side) for t, side in zip(times_s, drawn, strict=True)]
            due_s = {
                side: t.before + t.after + point.scale * problem.steps * step_s[side]
                for side, t in times.items()
            }
            real_shares, slowdowns = Figures(), Figures()
            for name, server in turns:
                products = [product_s()]
                real_shares[name] = run_real(server, edits, arrivals, due_s)
                products.append(product_s())
                slowdowns[name] = round(statistics.mean(products) / product, 3)
            figures: Figures = {
                "load": point.load,
                "scale": point.scale,
                "per_minute": round(60 * rate, 1),
                "slower": slowdowns,
                "real": real_shares,
                "simulated": simulated(times, slowdowns, problem.steps, arrivals, due_s),
            }
            report["rounds"].append(figures)
            say(figures)
    report["summary"] = summary(report["rounds"])
    say(report["summary"])
    return report


def simulated(
    times: AllTimes,
    slowdowns: Mapping[str, float],
    steps: int,
    arrivals: Sequence[tuple[float, int]],
    due_s: Mapping[int, float],
) -> Figures:
    """Return the shares in time by policy, in virtual time. A policy's steps are as much slower as
    its server was; those of a policy without a server, as much as servers were on average.
    """
    mean = statistics.mean(slowdowns.values())
    return {
        name: simulate(
            policy,
            {side: t.slower(slowdowns.get(name, mean)) for side, t in times.items()},
            steps,
            arrivals,
            due_s,
            cores(),
        )
        for name, policy in policies().items()
    }


def summary(rounds: Sequence[Figures]) -> dict[str, Figures]:
    """For each point: the shares in time, and how far measured and simulated ones are apart."""
    by_point: dict[Point, list[Figures]] = {}
    for figures in rounds:
        by_point.setdefault(Point(figures["load"], figures["scale"]), []).append(figures)
    return {point.name: _summary(of_point) for point, of_point in by_point.items()}


def _summary(rounds: Sequence[Figures]) -> Figures:
    def all_of(kind: str, name: str) -> list[float]:
        return [figures[kind][name]["sar"] for figures in rounds]

    means: Figures = {
        f"{kind} {name}": round(statistics.mean(all_of(kind, name)), 3)
        for kind in ("real", "simulated")
        for name in rounds[0][kind]
    }
    for name in rounds[0]["real"]:
        pairs = zip(all_of("real", name), all_of("simulated", name), strict=True)
        differences = [100 * (measured - simulated) for measured, simulated in pairs]
        means[f"apart {name}"] = round(statistics.mean(differences), 1)
        means[f"error {name}"] = round(statistics.stdev(differences) / len(differences) ** 0.5, 1)
    return means


def say(line: object) -> None:
    print(line, flush=True)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    problem = tetriserve(args.mix, args.scales) if args.mix else MASKED
    stolen, begin = stolen_s(), time.perf_counter()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as running:
        folder = Path(directory)
        model = large_model(folder / "model", pictures=problem.kind == "generate")
        products = [product_s()]
        times = profile_steps(model, folder / "costs.json", list(problem.shares))
        products.append(product_s())
        servers = {}
        for name in problem.servers:
            engine, config = CONFIGS[name], folder / f"{name}.toml"
            config.write_text(
                tomli_w.dumps({"engine": {**engine, "costs": str(folder / "costs.json")}}),
                encoding="utf-8",
            )
            logs = folder / f"logs-{name}"
            [servers[name]] = running.enter_context(own_workers(str(model), logs, 1, config))
        report = run(problem, servers, times, statistics.mean(products), args)
    seconds = time.perf_counter() - begin
    report["about"] = {
        "hardware": machine(),
        "mix": args.mix,
        "edits": args.edits,
        "rounds": args.rounds,
        "seed": args.seed,
        "minutes": round(seconds / 60, 1),
        "stolen_share": round((stolen_s() - stolen) / seconds, 3),
    }
    say(report["about"])
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
