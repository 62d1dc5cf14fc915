"""Measure the share of edits that are in time on a real worker of two devices, and compare it with
the simulator.

    python scripts/bench due_times --json docs/benchmarks/due_times.json

The edits are dense edits of FLUX Fill of width 512 (random weights) in three sizes. They come by a
Poisson process to a real Triton. A device is a process of one thread. First the worker is profiled
(`profile_costs`): a step of each size on one device with both busy, and on two devices. Servers
start with that profile (`[engine] costs`). Then the parts of an edit before and after its steps are
measured.

In each round, at each load, the same arrivals go to three systems in turn. The first is a worker
with the policy `deadline`. The second is a worker where each edit keeps one device (`spread`, a row
per device). The third is the simulator (`shared_cores.py`) with the measured times. It has the
schedulers of both servers, an encoder and a decoder that take edits one by one, and the machine's
cores for all of them. It also simulates edits that keep two devices, which no server runs.

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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from maskserve_engine.scheduling.gangs.batching import Batching
from maskserve_engine.scheduling.gangs.deadline import Deadline
from maskserve_engine.scheduling.gangs.scheduler import GangScheduler
from maskserve_engine.scheduling.spread import Spread
from maskserve_engine.scheduling.step_scheduler import SchedulingPolicy, Ticket
from maskserve_studies.deadlines.gangs import Fixed
from maskserve_studies.due_times.shared_cores import Machine, StagedEdit

Figures = dict[str, Any]
DEVICES = 2
STEPS = 16
LOADS = (0.5, 0.8, 1.2)
"""Loads, as a share of the rate that two devices reach when each edit keeps one device."""
DUE = {64: 4.0, 96: 2.0, 128: None}
"""Due times by the picture's side, as a multiple of the edit's steps on one device. The time
outside the steps is added. None: halfway between the steps on one device and on both. The largest
edits are then in time only on both devices, as TetriServe's are.
"""
_PRODUCTS = 400
_BEFORE = ("preprocess", "encode", "prepare")
CONFIGS: Mapping[str, dict[str, Any]] = {
    "deadline": {"devices": DEVICES, "policy": "deadline"},
    "fixed1": {"devices": DEVICES, "policy": "spread", "max_rows": 1},
}


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


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--edits", type=int, default=30, help="of each load in each round")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args(arguments)
    if args.edits < len(DUE):
        parser.error(f"--edits: accepted: {len(DUE)} or more")
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


def edits_by_side() -> dict[int, list[Edit]]:
    photos = find_photos(CHECKOUT / "assets")
    settings = {"cache": "off", "num_inference_steps": STEPS}
    return {side: make_edits(InputOptions(side, 8, 4, settings=settings), photos) for side in DUE}


def send(server: Server, edit: Edit, due_ms: int) -> tuple[float, dict[str, Any]]:
    """Seconds until the answer, and its META. META is empty if the edit was refused."""
    begin = time.perf_counter()
    with Client(server.grpc) as client:
        try:
            result = client.edit(
                edit.image,
                edit.mask,
                edit.prompt,
                **edit.settings,
                deadline_ms=due_ms,
                on_late="finish",
            )
        except MaskserveError:
            return time.perf_counter() - begin, {}
    return time.perf_counter() - begin, result.meta


def profile_steps(model: Path, file: Path) -> dict[int, Times]:
    """Profile steps of each size at each degree with all devices busy. The profile goes
    to `file`.
    """
    args = profile_costs.parse(["--devices", str(DEVICES), "--sides", *map(str, DUE)])
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
        for side in DUE
    }


def with_stages(
    server: Server, times: Mapping[int, Times], edits: Mapping[int, Sequence[Edit]]
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


def patience(side: int, times: Times) -> float:
    """Seconds per step within which an edit is in time."""
    multiple = DUE[side]
    return statistics.mean(times.step) if multiple is None else multiple * times.step[0]


def sides(count: int, rng: np.random.Generator) -> list[int]:
    """Picture sides in equal numbers, shuffled."""
    all_sides = np.resize(np.array(sorted(DUE)), count)
    return [int(side) for side in rng.permutation(all_sides)]


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
    return shares(met)


def simulate(
    policy: SchedulingPolicy,
    times: Mapping[int, Times],
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
            STEPS,
            tokens,
            tokens,
            at,
            due=at + due[side] - side_times.after,
            seconds=side_times.step,
            shared=side_times.shared,
        )
        edits.append(StagedEdit(ticket, side_times.before, side_times.after))
    answered = Machine(policy, DEVICES, cores).run(edits)
    return shares(
        [
            (side, answered[f"{side}-{number}"] <= at + due[side])
            for number, (at, side) in enumerate(arrivals)
        ]
    )


def policies() -> dict[str, SchedulingPolicy]:
    """The policies of the servers, and `fixed2`, which no server uses."""
    engine = EngineConfig()
    rows, waiting = engine.max_rows, engine.max_waiting
    return {
        "deadline": GangScheduler(Batching(Deadline(DEVICES), rows), DEVICES, rows, waiting),
        "fixed1": Spread(DEVICES, 1, waiting, 0.0),
        "fixed2": GangScheduler(Fixed(DEVICES, DEVICES), DEVICES, rows, waiting),
    }


def shares(outcomes: Sequence[tuple[int, bool]]) -> Figures:
    def share(flags: Sequence[bool]) -> float:
        return round(sum(flags) / max(1, len(flags)), 3)

    by_side = {
        str(side): share([is_met for edit_side, is_met in outcomes if edit_side == side])
        for side in DUE
    }
    return {"sar": share([is_met for _, is_met in outcomes]), "by_side": by_side}


def run(
    servers: Mapping[str, Server],
    times: Mapping[int, Times],
    product: float,
    args: argparse.Namespace,
) -> Figures:
    """Run all rounds.

    Args:
        servers: by policy.
        times: of steps, as profiled.
        product: `product_s` at the time of the profile.
        args: of the command.
    """
    edits = edits_by_side()
    times = with_stages(servers["deadline"], times, edits)
    due_s = {side: t.before + t.after + STEPS * patience(side, t) for side, t in times.items()}
    work = statistics.mean(STEPS * t.step[0] for t in times.values())
    report: Figures = {
        "times": {
            str(side): {
                "step_ms": [round(1e3 * s, 1) for s in t.step],
                "before_ms": round(1e3 * t.before),
                "after_ms": round(1e3 * t.after),
                "due_ms": round(1e3 * due_s[side]),
            }
            for side, t in times.items()
        },
        "rounds": [],
    }
    say(report["times"])
    for number in range(args.rounds):
        for load in LOADS:
            rng, rate = np.random.default_rng((args.seed, number)), load * DEVICES / work
            times_s = np.cumsum(draw_gaps(rate, args.edits, rng))
            arrivals = [
                (float(t), side) for t, side in zip(times_s, sides(args.edits, rng), strict=True)
            ]
            turns = list(servers.items())[:: 1 if number % 2 else -1]
            real_shares, slowdowns = Figures(), Figures()
            for name, server in turns:
                products = [product_s()]
                real_shares[name] = run_real(server, edits, arrivals, due_s)
                products.append(product_s())
                slowdowns[name] = round(statistics.mean(products) / product, 3)
            slowdown_by_policy = {**slowdowns, "fixed2": statistics.mean(slowdowns.values())}
            point: Figures = {
                "load": load,
                "per_minute": round(60 * rate, 1),
                "slower": slowdowns,
                "real": real_shares,
                "simulated": {
                    name: simulate(
                        policy,
                        {
                            side: side_times.slower(slowdown_by_policy[name])
                            for side, side_times in times.items()
                        },
                        arrivals,
                        due_s,
                        cores(),
                    )
                    for name, policy in policies().items()
                },
            }
            report["rounds"].append(point)
            say(point)
    report["summary"] = summary(report["rounds"])
    say(report["summary"])
    return report


def summary(points: Sequence[Figures]) -> Figures:
    """For each load: the shares in time, and the distance between measured and simulated shares."""
    by_load = {}
    for load in LOADS:
        of_load = [point for point in points if point["load"] == load]

        def all_of(kind: str, name: str, of_load: list[Figures] = of_load) -> list[float]:
            return [point[kind][name]["sar"] for point in of_load]

        figures: Figures = {
            f"{kind} {name}": round(statistics.mean(all_of(kind, name)), 3)
            for kind in ("real", "simulated")
            for name in of_load[0][kind]
        }
        for name in CONFIGS:
            pairs = zip(all_of("real", name), all_of("simulated", name), strict=True)
            differences = [
                100 * (measured_share - simulated_share)
                for measured_share, simulated_share in pairs
            ]
            figures[f"apart {name}"] = round(statistics.mean(differences), 1)
            figures[f"error {name}"] = round(
                statistics.stdev(differences) / len(differences) ** 0.5, 1
            )
        by_load[str(load)] = figures
    return by_load


def say(line: object) -> None:
    print(line, flush=True)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    stolen, begin = stolen_s(), time.perf_counter()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as running:
        folder = Path(directory)
        model = large_model(folder / "model")
        products = [product_s()]
        times = profile_steps(model, folder / "costs.json")
        products.append(product_s())
        servers = {}
        for name, engine in CONFIGS.items():
            config = folder / f"{name}.toml"
            config.write_text(
                tomli_w.dumps({"engine": {**engine, "costs": str(folder / "costs.json")}}),
                encoding="utf-8",
            )
            logs = folder / f"logs-{name}"
            [servers[name]] = running.enter_context(own_workers(str(model), logs, 1, config))
        report = run(servers, times, statistics.mean(products), args)
    seconds = time.perf_counter() - begin
    report["about"] = {
        "hardware": machine(),
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
