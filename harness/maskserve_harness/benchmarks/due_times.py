"""Share of edits that are in time on a real worker of two devices, beside the simulator.

    python scripts/bench due_times --json due_times.json

FLUX Fill of width 512 (random weights), dense edits of three sizes, Poisson, behind a real Triton.
A device is a process of one thread. First the worker's own times are measured: a step of each size
on one device with both busy, and on two; what an edit takes beside its steps. Then, at each load,
the same arrivals go to a worker with the policy `deadline` and to one where each edit keeps one
device (`spread`, a row per device), in turn; and into the simulator on the measured times, which
also has edits that keep two.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from maskserve_client import Client, MaskserveError
from maskserve_core.worker.gangs.deadline import Deadline
from maskserve_core.worker.gangs.work import GangPolicy
from maskserve_core.worker.step_scheduler import Ticket
from maskserve_harness.benchmarks.edit import large_model
from maskserve_harness.checkout import CHECKOUT
from maskserve_harness.machine import machine, stolen_s
from maskserve_harness.perf.inputs import Edit, InputOptions, find_photos, make_edits
from maskserve_harness.perf.load import draw_gaps
from maskserve_harness.perf.server import Server, own_workers
from maskserve_harness.simulator.gangs import Fixed, simulate

Figures = dict[str, Any]
DEVICES = 2
STEPS = 5
LOADS = (0.5, 0.8, 1.2)
"""Of what two devices can do when each edit keeps one."""
DUE = {64: 4.0, 96: 2.0, 128: 0.8}
"""By the picture's side, of an edit's steps on one device; what it takes beside them is added. The
largest are in time on both devices only, as TetriServe's."""
CONFIGS: Mapping[str, dict[str, Any]] = {
    "deadline": {"devices": DEVICES, "policy": "deadline"},
    "fixed1": {"devices": DEVICES, "policy": "spread", "max_rows": 1},
}


@dataclass(frozen=True, slots=True)
class Times:
    """Of edits of one size, in seconds."""

    step: tuple[float, float]
    """On one device and on two."""
    beside: float
    """From sending to answer, without its steps."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--edits", type=int, default=27, help="of each run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args(arguments)
    if args.edits < len(DUE):
        parser.error(f"--edits: accepted: {len(DUE)} or more")
    return args


def edits_by_side() -> dict[int, list[Edit]]:
    photos = find_photos(CHECKOUT / "assets")
    settings = {"cache": "off", "num_inference_steps": STEPS}
    return {side: make_edits(InputOptions(side, 8, 4, settings=settings), photos) for side in DUE}


def send(server: Server, edit: Edit, due_ms: int) -> tuple[float, dict[str, Any]]:
    """Seconds until the answer, and its META; empty: the edit was refused."""
    begin = time.perf_counter()
    with Client(server.grpc) as client:
        try:
            done = client.edit(
                edit.image,
                edit.mask,
                edit.prompt,
                **edit.settings,
                deadline_ms=due_ms,
                on_late="finish",
            )
        except MaskserveError:
            return time.perf_counter() - begin, {}
    return time.perf_counter() - begin, done.meta


def measured(
    servers: Mapping[str, Server], edits: Mapping[int, Sequence[Edit]]
) -> dict[int, Times]:
    """Medians; both devices are busy where a step on one is measured, as they are under load."""
    found = {}
    with ThreadPoolExecutor(DEVICES) as pool:
        for side, of_side in edits.items():
            sent = [*of_side[:2], *of_side[:6]]  # the first two set kernels up
            both = list(pool.map(lambda e: send(servers["fixed1"], e, 60_000), sent))[2:]
            alone = [send(servers["deadline"], each, 60_000) for each in sent][2:]
            one, two = [
                statistics.median(meta["timings_ms"]["denoise"] for _, meta in each) / 1e3 / STEPS
                for each in (both, alone)
            ]
            beside = statistics.median(took - STEPS * two for took, _ in alone)
            found[side] = Times((one, two), beside)
    return found


def sides(count: int, rng: np.random.Generator) -> list[int]:
    """Equally many of each size, shuffled."""
    each = np.resize(np.array(sorted(DUE)), count)
    return [int(side) for side in rng.permutation(each)]


def real(
    server: Server,
    edits: Mapping[int, Sequence[Edit]],
    arrivals: Sequence[tuple[float, int]],
    due: Mapping[int, float],
) -> Figures:
    """Send edits as they arrive; which share is in time."""
    with ThreadPoolExecutor(len(arrivals)) as pool:
        start, calls = time.perf_counter(), []
        for number, (at, side) in enumerate(arrivals):
            time.sleep(max(0.0, start + at - time.perf_counter()))
            edit = edits[side][number % len(edits[side])]
            calls.append((side, pool.submit(send, server, edit, round(1e3 * due[side]))))
        met = [(side, call.result()[1].get("slo") == "met") for side, call in calls]
    return shares(met)


def simulated(
    policy: GangPolicy,
    times: Mapping[int, Times],
    arrivals: Sequence[tuple[float, int]],
    due: Mapping[int, float],
) -> Figures:
    """The same in virtual time. What an edit takes beside its steps is taken off its due time."""
    tickets = [
        Ticket(
            f"{side}-{number}",
            STEPS,
            (side // 16) ** 2,
            (side // 16) ** 2,
            at,
            due=at + due[side] - times[side].beside,
            seconds=times[side].step,
        )
        for number, (at, side) in enumerate(arrivals)
    ]
    ended = simulate(policy, tickets, DEVICES).ended
    return shares(
        [(int(t.request_id.split("-")[0]), ended[t.request_id] <= (t.due or 0.0)) for t in tickets]
    )


def shares(met: Sequence[tuple[int, bool]]) -> Figures:
    def share(those: Sequence[bool]) -> float:
        return round(sum(those) / max(1, len(those)), 3)

    by_side = {str(side): share([was for of, was in met if of == side]) for side in DUE}
    return {"sar": share([was for _, was in met]), "by_side": by_side}


def run(servers: Mapping[str, Server], count: int, seed: int) -> Figures:
    edits = edits_by_side()
    times = measured(servers, edits)
    due = {side: t.beside + DUE[side] * STEPS * t.step[0] for side, t in times.items()}
    work = statistics.mean(STEPS * t.step[0] for t in times.values())
    report: Figures = {
        "times": {
            str(side): {
                "step_ms": [round(1e3 * s, 1) for s in t.step],
                "beside_ms": round(1e3 * t.beside),
                "due_ms": round(1e3 * due[side]),
            }
            for side, t in times.items()
        },
        "loads": [],
    }
    say(report["times"])
    for load in LOADS:
        rng, rate = np.random.default_rng(seed), load * DEVICES / work
        at = np.cumsum(draw_gaps(rate, count, rng))
        arrivals = [(float(t), side) for t, side in zip(at, sides(count, rng), strict=True)]
        point: Figures = {
            "load": load,
            "per_minute": round(60 * rate, 1),
            "real": {n: real(each, edits, arrivals, due) for n, each in servers.items()},
            "simulated": {
                name: simulated(policy, times, arrivals, due)
                for name, policy in (
                    ("deadline", Deadline(DEVICES)),
                    ("fixed1", Fixed(DEVICES, 1)),
                    ("fixed2", Fixed(DEVICES, 2)),
                )
            },
        }
        report["loads"].append(point)
        say(point)
    return report


def say(line: object) -> None:
    print(line, flush=True)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    stolen, begin = stolen_s(), time.perf_counter()
    with tempfile.TemporaryDirectory() as made, ExitStack() as running:
        folder = Path(made)
        model = large_model(folder / "model")
        servers = {}
        for name, engine in CONFIGS.items():
            config = folder / f"{name}.toml"
            config.write_text(tomli_w.dumps({"engine": engine}), encoding="utf-8")
            logs = folder / f"logs-{name}"
            [servers[name]] = running.enter_context(own_workers(str(model), logs, 1, config))
        report = run(servers, args.edits, args.seed)
    took = time.perf_counter() - begin
    report["about"] = {
        "hardware": machine(),
        "edits": args.edits,
        "seed": args.seed,
        "minutes": round(took / 60, 1),
        "stolen_share": round((stolen_s() - stolen) / took, 3),
    }
    say(report["about"])
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
