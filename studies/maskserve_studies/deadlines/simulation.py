"""Due times on eight devices: TetriServe's Figs. 6, 7, 11 and 13, the optimum of small instances,
and the gain from masks.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from maskserve_benchmarks.simulator.workload import Workload
from maskserve_benchmarks.simulator.workload import draw as draw_masks
from maskserve_engine.planning.degree_costs import DEGREES
from maskserve_engine.scheduling.gangs.batching import Batching
from maskserve_engine.scheduling.gangs.deadline import Deadline
from maskserve_engine.scheduling.gangs.fixed import Fixed
from maskserve_engine.scheduling.gangs.rounds import Rounds
from maskserve_engine.scheduling.gangs.work import GangPolicy, Work
from maskserve_engine.scheduling.step_scheduler import Ticket
from maskserve_studies.deadlines.gangs import (
    MIXES,
    SIZES,
    FixedBySize,
    GangCosts,
    LateLast,
    Load,
    Outcome,
    best_degrees,
    draw,
    simulate,
    step_times,
)
from maskserve_studies.deadlines.small_instances import optimum, small_instance

Report = dict[str, Any]
Make = Callable[[], GangPolicy]
Times = dict[int, tuple[float, ...]]

RUNS = 5
"""Seeds per point."""
DEVICES = 8
STEPS = 50
SCALES = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)
RATES = (6.0, 9.0, 12.0, 15.0, 18.0)
ROUND_STEPS = (1, 2, 5, 10)
DECISION_SECONDS = (0.0, 0.005, 0.02, 0.05)
FIXED = tuple(f"sp{k}" for k in DEGREES)
MAX_ROWS = 8
"""Most rows of a step, for policies that share a step among rows."""
SMALL = 200
"""Number of instances whose optimum is searched."""


def policies(times: Times, devices: int = DEVICES) -> dict[str, Make]:
    """Return the policies by name. A round of `roundsN`: N of the slowest edit's fastest steps."""
    return {
        **{f"sp{k}": partial(Fixed, devices, k) for k in DEGREES if k <= devices},
        "sp8_late_last": lambda: LateLast(devices, devices),
        "per_resolution": lambda: FixedBySize(devices, best_degrees(times, STEPS)),
        **{f"rounds{n}": partial(rounds, times, n, devices) for n in ROUND_STEPS},
        "deadline": lambda: Deadline(devices),
        "deadline_batched": lambda: Batching(Deadline(devices), MAX_ROWS),
        "rounds5_batched": lambda: Batching(rounds(times, 5, devices), MAX_ROWS),
    }


def rounds(times: Times, steps: int, devices: int) -> Rounds:
    return Rounds(devices, steps * min(times[max(times)]) * (1 + 1e-9))


def point(
    load: Load,
    times: Times,
    names: Iterable[str],
    seeds: Sequence[int],
    decision: float = 0.0,
    devices: int = DEVICES,
) -> Report:
    """Return the share of edits in time (SAR) of each policy on the same edits: mean, per seed, by
    size.
    """
    policy_makers, shared = policies(times, devices), GangCosts().fixed
    report: Report = {
        "mix": load.mix,
        "per_minute": load.per_minute,
        "scale": load.scale,
        "decision_seconds": decision,
        "sar": {},
        "seeds": {},
        "by_size": {},
    }
    for name in names:
        runs: list[Outcome] = [
            simulate(policy_makers[name](), draw(load, times, seed, shared), devices, decision)
            for seed in seeds
        ]
        shares = [run.in_time() for run in runs]
        report["sar"][name] = float(np.mean(shares))
        report["seeds"][name] = shares
        report["by_size"][name] = {
            str(side): float(np.mean([run.in_time(f"{side}-") for run in runs])) for side in SIZES
        }
    return report


def masked(rate: float, seed: int, edits: int = 200) -> tuple[list[Ticket], list[Ticket]]:
    """Return edits with production masks at 1024 x 1024, due in 3 s: priced by computed tokens, and
    as if all were dense.
    """
    costs = GangCosts()
    dense = costs.seconds(1024)
    requests = draw_masks(Workload(edits, rate / 60, "production", (STEPS,)), 4096, seed)
    by_tokens = [
        Ticket(
            f"e-{r.number}",
            STEPS,
            4096,
            r.active,
            r.arrival,
            due=r.arrival + 3.0,
            seconds=_cached(costs, -(-r.active // 32) * 32) if r.active < 0.9 * 4096 else dense,
            shared=costs.fixed,
        )
        for r in requests
    ]
    return by_tokens, [replace(ticket, seconds=dense) for ticket in by_tokens]


@lru_cache(maxsize=256)
def _cached(costs: GangCosts, active: int) -> tuple[float, ...]:
    return costs.seconds(1024, active / 4096)


def masks(seeds: Sequence[int]) -> Report:
    """Rates at which nine of ten edits are in time, and the loss of pricing by resolution at 220
    edits a minute.
    """

    def sar(rate: float, kind: str) -> float:
        shares = []
        for seed in seeds[:2]:
            by_tokens, by_size = masked(rate, seed)
            tickets = by_tokens if kind == "cached" else by_size
            took = {t.request_id: t.seconds for t in by_tokens} if kind == "believed" else None
            shares.append(simulate(Deadline(DEVICES), tickets, DEVICES, took=took).in_time())
        return float(np.mean(shares))

    dense = {str(rate): sar(rate, "dense") for rate in (30, 35, 40, 45, 50, 55, 60)}
    cached = {str(rate): sar(rate, "cached") for rate in (220, 260, 300, 340)}
    return {
        "dense": dense,
        "cached": cached,
        "priced_by_resolution_220": sar(220, "believed"),
        "rate_dense": max((float(r) for r, s in dense.items() if s >= 0.9 - 1e-9), default=0.0),
        "rate_cached": max((float(r) for r, s in cached.items() if s >= 0.9 - 1e-9), default=0.0),
    }


def small(times: Times, first: int) -> Report:
    """Each policy's share of the edits that the optimum serves in time.

    Args:
        times: seconds of a step by size and degree.
        first: seed of the first instance.
    """
    best, deadline_share, rounds_share = 0, 0.0, 0.0
    for seed in range(first, first + SMALL):
        tickets = small_instance(times, seed)
        best += optimum(tickets, 4)
        # One step stands for STEPS / 3 steps, so a starving edit waits longer by that factor.
        policy = Deadline(4, patience=10.0 * STEPS / 3, longest_step=9.0)
        deadline_share += len(tickets) * simulate(policy, tickets, 4).in_time()
        shortest = min(min(t.seconds) for t in tickets)
        rounds_share += len(tickets) * simulate(Rounds(4, shortest), tickets, 4).in_time()
    return {"instances": SMALL, "deadline": deadline_share / best, "rounds": rounds_share / best}


def decisions(times: Times, count: int = 2000) -> Report:
    """Milliseconds of processor time of one decision over 64 edits on 8 devices."""
    report = {}
    for name in ("rounds5", "deadline", "deadline_batched"):
        rng, times_ms = random.Random(1), []
        for _ in range(count):
            works = []
            for number in range(64):
                side = rng.choice(SIZES)
                ticket = Ticket(
                    f"{side}-{number}",
                    STEPS,
                    1,
                    1,
                    0.0,
                    due=rng.uniform(0.2, 6),
                    seconds=times[side],
                    shared=GangCosts().fixed,
                )
                works.append(Work(ticket, rng.randint(1, STEPS), 0.0))
            policy = policies(times)[name]()
            start = time.process_time()
            policy.decide(0.0, works)
            times_ms.append(1e3 * (time.process_time() - start))
        report[name] = {
            "p50": float(np.percentile(times_ms, 50)),
            "p99": float(np.percentile(times_ms, 99)),
        }
    return report


def run_deadlines(say: Callable[[str], None], seed: int = 1) -> Report:
    """Run all parts.

    Args:
        say: prints progress.
        seed: with 1 the edits are those that the policy `deadline` was tuned on.
    """
    seeds = tuple(range(seed, seed + RUNS))
    times = step_times(GangCosts())
    names = [n for n in policies(times) if n not in ("rounds1", "rounds10")]
    report: Report = {
        "seeds": seeds,
        "step_ms": {str(side): [1e3 * t for t in ts] for side, ts in times.items()},
        "table": {
            "dense": [1e3 * t for t in GangCosts(495.0).seconds(1024)],
            "kv_0.1": [1e3 * t for t in GangCosts(495.0).seconds(1024, 0.1)],
        },
        "decision_ms": decisions(times),
        "small": small(times, SMALL * (seed - 1)),
    }
    say(f"decisions {report['decision_ms']}, of the optimum {report['small']}")
    report["scales"] = []
    for mix, scale in itertools.product(MIXES, SCALES):
        report["scales"].append(point(Load(mix, 12.0, scale), times, names, seeds))
        say(_line(report["scales"][-1]))
    report["rates"] = []
    for mix, rate in itertools.product(MIXES, RATES):
        report["rates"].append(point(Load(mix, rate), times, names, seeds))
        say(_line(report["rates"][-1]))
    report["masks"] = masks(seeds)
    say(f"masks {report['masks']}")
    report["round_lengths"] = []
    for decision in DECISION_SECONDS:
        for rate in (6.0, 12.0, 18.0):
            lengths = [f"rounds{n}" for n in ROUND_STEPS]
            figures = point(Load("uniform", rate), times, lengths, seeds, decision)
            report["round_lengths"].append(figures)
            say(f"decision {1e3 * decision:.0f} ms: {_line(figures)}")
    report["summary"] = summary(report)
    say(f"{report['summary']}")
    return report


def summary(report: Report) -> Report:
    """Return the figures that bars judge. Gains are relative."""

    def gain(figures: Report) -> float:
        shares = figures["sar"]
        return float(shares["deadline"] / max(shares[n] for n in FIXED) - 1.0)

    gains = {
        mix: next(gain(at) for at in report["scales"] if at["mix"] == mix and at["scale"] == 1.0)
        for mix in MIXES
    }
    fast = {at["mix"]: at["sar"] for at in report["rates"] if at["per_minute"] == 18.0}
    mask_figures = report["masks"]
    return {
        "gain_uniform": gains["uniform"],
        "gain_skewed": gains["skewed"],
        "best_gain": max(gain(at) for at in report["scales"]),
        "skewed_18": fast["skewed"]["deadline"],
        "uniform_18_over_rounds": fast["uniform"]["deadline"]
        - max(v for n, v in fast["uniform"].items() if n.startswith("rounds")),
        "of_optimum": report["small"]["deadline"],
        "masks_rate_gain": mask_figures["rate_cached"] / mask_figures["rate_dense"]
        if mask_figures["rate_dense"]
        else 0,
        "masks_220": mask_figures["cached"]["220"],
        "masks_220_by_resolution": mask_figures["priced_by_resolution_220"],
        "decision_p99_ms": report["decision_ms"]["deadline_batched"]["p99"],
    }


def _line(figures: Report) -> str:
    sar = "  ".join(f"{name} {value:.3f}" for name, value in figures["sar"].items())
    return f"{figures['mix']:8} {figures['per_minute']:4.0f}/min {figures['scale']:.1f}x: {sar}"
