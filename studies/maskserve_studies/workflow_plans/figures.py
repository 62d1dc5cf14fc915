"""LegoDiffusion's figures with the router's order, score and admission, and the gains from masks
and due times.

A system's *rate* is the load at which it has nine of ten requests in time, as a share of the
devices' dense capacity. Requests are due at twice their time alone. All systems serve the same
requests.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from maskserve_benchmarks.simulator.hardware import Hardware
from maskserve_studies.workflow_plans.chains import RULES, draw_chains, simulate_chains
from maskserve_studies.workflow_plans.dispatch import decide
from maskserve_studies.workflow_plans.simulation import Node, PlanRequest, PlanRun, Rules
from maskserve_studies.workflow_plans.systems import (
    BASES,
    DEVICES,
    GIB,
    LOAD_S,
    MONOLITHS,
    SETTINGS,
    SYSTEMS,
    Flow,
    FlowRequest,
    Load,
    draw_requests,
    in_time,
    maskserve_system,
    most,
    rate,
)
from maskserve_workflows.scheduling import NodePlace, Prices, ReadyNode, admits

Report = dict[str, Any]

PER_DEVICE: Final = 50
"""Requests per device."""
SEEDS: Final = (1, 2, 3, 4, 5)
LOADS: Final = (0.8, 1.2, 1.6)
BURSTS: Final = (1.0, 2.0, 4.0, 8.0)
"""Coefficients of variation of the gaps, at a load of `BURST_LOAD`, for the paper's Fig. 9 h."""
BURST_LOAD: Final = 0.25
SIZE_LOAD: Final = 0.5
"""Load as a share of the setting's devices, for the paper's Fig. 9 i."""
TURNS: Final = 4
GAINS_OF: Final = "S6"
"""Setting of the paper's Fig. 9 g to i."""
ASSUMPTIONS: Final[Mapping[str, Sequence[str]]] = {
    "none": (),
    "whole cards": ("whole",),
    "by turns": ("turns",),
    "unseen queues": ("blind",),
    "whole cards, by turns": ("whole", "turns"),
    "whole cards, unseen queues": ("whole", "blind"),
    "by turns, unseen queues": ("turns", "blind"),
    "whole cards, by turns, unseen queues": ("whole", "turns", "blind"),
    "small cards": ("small",),
    "small cards, by turns": ("small", "turns"),
    "eight workflows, by turns": ("eight", "turns"),
    "whole cards, by turns, slow loads": ("whole", "turns", "slow"),
}
"""Assumptions that the paper may make and does not state (`assumed`)."""
SWEEPS: Final[dict[str, tuple[float, ...]]] = {
    "scale": (1.0, 4.0, 12.0),
    "devices": (16, 32),
}
"""Sweeps of the paper's Fig. 9 g and i, with S4 on 8 devices. S6 would need ten times the requests:
else due times of twelve times its longest request are long compared with the run.
"""
IN_FLIGHT: Final = 500
MANY: Final = 256
GROUP: Final = 64
SHAPES: Final = {"sd3": (333, 1536, 6), "dev": (512, 3072, 2)}
"""Tokens of a prompt, the width, and the number of a ControlNet's blocks, from the paper's sizes.
"""
MEAN_LOADS: Final = (0.3, 0.6, 0.9)
"""Loads for the paper's mean seconds (Fig. 4), whose load it does not state."""
DECIDE_S: Final = 1.9e-3
ADMIT_S: Final = 0.9e-3
"""Medians of one decision and one admission at `MANY` devices with `IN_FLIGHT` plans, one core of a
2-core AMD EPYC, 2026-11-26 (`decisions`).
"""


def rates(load: Load, seeds: Sequence[int], systems: Sequence[str] = tuple(SYSTEMS)) -> Report:
    """Rates of each system by seed. Each step of `lego` is simulated, so it has only its shares in
    time at our rates.
    """
    report = {
        name: [round(rate(name, load, (seed,)), 3) for seed in seeds]
        for name in systems
        if name != "lego"
    }
    if "lego" in systems:
        report["lego_at_ours"] = [
            round(in_time("lego", replace(load, load=at, seed=seed)), 3)
            for at, seed in zip(report["ours"], seeds, strict=True)
        ]
    return report


def shares(load: Load, seeds: Sequence[int], systems: Sequence[str] = tuple(SYSTEMS)) -> Report:
    """Share of requests in time, for each system."""
    return {
        name: round(sum(in_time(name, replace(load, seed=s)) for s in seeds) / len(seeds), 3)
        for name in systems
    }


def overload(setting: str, requests: int, seeds: Sequence[int]) -> Report:
    """Load the devices twice over: the share in time with admission and without it, and the share
    of wrongly refused requests. A wrongly refused request would have been in time, and so would
    every request that came before it. Later ones are no measure: at twice the load each admitted
    request takes the place of some of them.
    """
    report: Report = {"setting": setting, "admission": 0.0, "without": 0.0, "refused_wrongly": 0.0}
    for seed in seeds:
        load = Load(setting, 2.0, DEVICES[setting], requests, seed)
        run, plan_requests = maskserve_system(load, draw_requests(load))
        run.run(plan_requests)
        free, plan_requests = maskserve_system(
            load, draw_requests(load), Rules("fcfs", admission=False)
        )
        free.run(plan_requests)
        refused = run.refused[:: max(1, len(run.refused) // 10)]
        wrongly = 0
        for number in refused:
            other_run, plan_requests = maskserve_system(load, draw_requests(load))
            other_run.always = frozenset({number})
            other_run.run(plan_requests)
            earlier = {key for key in run.numbers_in_time() if key < number}
            wrongly += earlier | {number} <= other_run.numbers_in_time()
        report["admission"] += 2.0 * run.in_time(plan_requests) / len(seeds)
        report["without"] += free.in_time(plan_requests) / len(seeds)
        report["refused_wrongly"] += wrongly / max(1, len(refused)) / len(seeds)
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in report.items()}


def alone(base: str) -> list[float]:
    """Seconds of a single request with a ControlNet on one, two and three devices by Algorithm 1,
    over its seconds on one device (Fig. 10).
    """
    flow, seconds = Flow(base, 1), []
    for devices in (1, 2, 3):
        load = Load(_setting(base), 1.0, devices, 1, 1, scale=1e6)
        run, plan_requests = SYSTEMS["lego"](load, [replace(draw_requests(load)[0], flow=flow)])
        run.run(plan_requests)
        seconds.append((run.plans[0].ended - plan_requests[0].arrival) / flow.solo_s)
    return [round(ratio, 3) for ratio in seconds]


def _setting(base: str) -> str:
    return next(name for name, bases in SETTINGS.items() if bases == (base,))


def loading(base: str) -> Report:
    """Seconds to load the workflow with a ControlNet, and seconds to load the base alone (Fig. 3,
    left).
    """
    whole = sum(Flow(base, 1).parts.values()) * LOAD_S
    alone_s = BASES[base].step[0] * LOAD_S
    return {"workflow_s": round(whole, 2), "base_s": round(alone_s, 2)}


def sharing(base: str, requests: int, seeds: Sequence[int]) -> Report:
    """A workflow with a ControlNet and one without run on two devices, each on its own device or
    with shared models. Mean seconds of a request at MEAN_LOADS, and GiB of models (Fig. 4, left).
    """
    report: Report = {}
    for name, system in (("apart", MONOLITHS["static"]), ("shared", maskserve_system)):
        loads = [Load(_setting(base), at, 2, requests, 1, shares=(0.5, 0.5)) for at in MEAN_LOADS]
        run, _ = system(loads[0], [])
        report[name] = {
            "mean_s": [_mean_s(system, load, seeds, slice(0, 1)) for load in loads],
            "gib": round(sum(run.first_bytes.values()) / GIB, 1),
        }
    return report


def degrees(requests: int, seeds: Sequence[int]) -> Report:
    """S1 on four devices by Algorithm 1: mean seconds of a request at MEAN_LOADS. The base has one
    device, two devices of a fixed pair, or all that are idle (Fig. 4, right).
    """
    report: Report = {}
    for name, devices, degree_slice in (
        ("one", 4, slice(0, 1)),
        ("two", 2, slice(1, 2)),
        ("adaptive", 4, slice(None)),
    ):
        # A pair counts as one device here, with twice the load.
        loads = [Load("S1", 4 / devices * at, devices, requests, 1) for at in MEAN_LOADS]
        report[name] = [_mean_s(SYSTEMS["lego"], load, seeds, degree_slice) for load in loads]
    return report


def passed_mib(base: str) -> Report:
    """MiB that pass between nodes, for a picture of 1024x1024 with a ControlNet (Fig. 11, right):
    each tensor, the sum if each call is a node, and the sum if an edit is one node.
    """
    words, width, blocks = SHAPES[base]
    steps, mib = BASES[base].steps, 2**20
    sizes = {
        "embeddings": words * 4096 * 2 / mib,
        "latents": 16 * 128 * 128 * 2 / mib,
        "residual": 4096 * width * 2 / mib,
        "picture": 1024 * 1024 * 3 / mib,
        "mask": 1024 * 1024 / mib,
    }
    # Base and ControlNet both take prompt and latents; the decoder takes the last latents.
    calls = 2 * sizes["latents"] + blocks * sizes["residual"]
    lego = 2 * sizes["embeddings"] + steps * calls + sizes["latents"] + 2 * sizes["picture"]
    edit = 3 * sizes["picture"] + sizes["mask"]  # source, control picture, answer
    return {name: round(size, 2) for name, size in (sizes | {"lego": lego, "ours": edit}).items()}


def _mean_s(
    system: Callable[[Load, Sequence[FlowRequest]], tuple[PlanRun, list[PlanRequest]]],
    load: Load,
    seeds: Sequence[int],
    degree_slice: slice,
) -> float:
    """Mean seconds of a request from arrival to end. No request is refused. Nodes that can use two
    devices may use only the numbers in `degree_slice`.
    """
    seconds = []
    for seed in seeds:
        run, plan_requests = system(load, draw_requests(replace(load, seed=seed)))
        run.rules = replace(run.rules, admission=False)
        run.run(
            [
                replace(a, nodes=tuple(_with(node, degree_slice) for node in a.nodes))
                for a in plan_requests
            ]
        )
        seconds += [plan.ended - plan.request.arrival for plan in run.plans]
    return round(statistics.mean(seconds), 2)


def _with(node: Node, degree_slice: slice) -> Node:
    return replace(node, run_s=node.run_s[degree_slice] or node.run_s)


# Assumptions behind the paper's gains


def assumed(load: Load, names: Sequence[str]) -> Load:
    """The load under assumptions.

    Args:
        load: without the assumptions.
        names: `whole`: a monolith has its card by itself; `small`: every system has room on a card
            for the largest monolith only; `turns`: each workflow is on for one of `TURNS` turns;
            `blind`: monoliths' admission does not see the lengths of their queues; `eight`: a base
            has eight workflows, not three; `slow`: a GiB takes a second to load.
    """
    changes: Mapping[str, Mapping[str, Any]] = {
        "whole": {"monolith_room": load.monolith},
        "small": {"room": load.monolith},
        "turns": {"turns": TURNS},
        "blind": {"blind": True},
        "eight": {"shares": (0.3, *[0.1] * 7)},
        "slow": {"load_s": 1.0},
    }
    for name in names:
        load = replace(load, **changes[name])
    return load


def gains(load: Load, seed: int) -> Report:
    """Gains for which the paper has 6x, 8x and 3x, of our system over planned monoliths: the
    shortest due times met at our rate, the strongest bursts at `BURST_LOAD`, and the fewest devices
    for the requests of `SIZE_LOAD`.
    """

    def sized(part: float) -> Load:
        devices = math.ceil(1.0 / part - 1e-9)
        return replace(load, devices=devices, load=SIZE_LOAD * load.devices / devices)

    due_load = replace(load, load=rate("ours", load, (seed,)))
    bursty = replace(load, load=BURST_LOAD)
    report: Report = {"due": {}, "cv": {}, "devices": {}}
    for name in ("planned", "ours"):
        shortest = most(name, lambda at: replace(due_load, scale=1.0 / at), (1 / 64, 1.0), (seed,))
        part = most(name, sized, (1 / 128, 1 / 4), (seed,))
        report["due"][name] = round(1.0 / shortest, 2) if shortest else None
        report["cv"][name] = round(
            most(name, lambda at: replace(bursty, cv=at), (1 / 8, 16.0), (seed,)), 2
        )
        report["devices"][name] = sized(part).devices if part else None
    return report


def chained(load: float, requests: int, seeds: Sequence[int]) -> Report:
    """Share of shipped plans in time: with least slack and admission of plans, and edit by edit."""
    hardware = Hardware()
    request_lists = [draw_chains(requests, load, seed, hardware) for seed in seeds]
    shares = {
        name: round(
            statistics.mean(simulate_chains(request_list, rules) for request_list in request_lists),
            3,
        )
        for name, rules in RULES.items()
    }
    return {"load": load, **shares}


# The control plane


def decisions(devices: int = MANY, plans: int = IN_FLIGHT, count: int = 21) -> Report:
    """Median processor seconds of a decision and of an admission."""
    rng, seconds, admitted = random.Random(1), [], []
    places = [
        NodePlace(f"d{n}", rng.uniform(0.1, 9.0) * (n > 0), frozenset("m")) for n in range(devices)
    ]
    waiting = [
        ReadyNode(str(n), rng.random(), rng.uniform(20, 40), 7.0, models=frozenset("m"))
        for n in range(max(plans - devices, 1))
    ]
    for _ in range(count):
        start = time.process_time()
        decide(waiting, places, Prices(), 0.0)
        seconds.append(time.process_time() - start)
        start = time.process_time()
        admits(waiting[0], waiting[1:], places, Prices(), 0.0)
        admitted.append(time.process_time() - start)
    return {"decide_s": statistics.median(seconds), "admit_s": statistics.median(admitted)}


def control_plane() -> Report:
    """The decisions' share of a request's latency, from their committed medians. Also the cores
    that decisions use at full load in groups of `GROUP` devices.
    """
    report = {}
    for base in ("dev", "sd35"):
        seconds = Flow(base, 0).solo_s
        decision_s = ADMIT_S + 2 * DECIDE_S  # it comes, and it ends
        report[base] = {
            "share": decision_s / (seconds + decision_s),
            "cores_in_groups": MANY / seconds * decision_s * GROUP / MANY,
        }
    return report


def run_plans(
    say: Callable[[str], None], per_device: int = PER_DEVICE, seeds: Sequence[int] = SEEDS
) -> Report:
    """Run everything."""
    report: Report = {"requests_per_device": per_device, "seeds": list(seeds)}

    def base(setting: str, **changes: Any) -> Load:
        load = replace(Load(setting, 1.0, DEVICES[setting], 1, 1), **changes)
        return replace(load, requests=per_device * load.devices)

    def record(name: str, figures: Any) -> Any:
        say(f"{name}: {figures}")
        return figures

    report["rates"] = {s: record(s, rates(base(s), seeds)) for s in SETTINGS}
    report["sweeps"] = {
        f"{name} {value:g}": record(f"{name} {value:g}", rates(base("S4", **{name: value}), seeds))
        for name, values in SWEEPS.items()
        for value in values
    }
    report["shares"] = {
        f"S4 {load:g}": record(f"S4 at {load:g}", shares(base("S4", load=load), seeds))
        for load in LOADS
    }
    report["bursts"] = {
        f"{cv:g}": record(f"cv {cv:g}", shares(base("S4", load=BURST_LOAD, cv=cv), seeds))
        for cv in BURSTS
    }
    fast_systems = (*MONOLITHS, "ours")
    report["by_turns"] = {
        s: record(f"{s} by turns", rates(base(s, turns=TURNS), seeds, fast_systems))
        for s in ("S1", "S2", "S3", "S4")
    }
    report["masks"] = record("masks", rates(base("S4", masked=True), seeds, fast_systems))
    report["assumed"] = {}
    for name, assumption in ASSUMPTIONS.items():
        loads = {s: assumed(base(s), assumption) for s in SETTINGS}
        report["assumed"][name] = {
            "rates": {s: rates(load, seeds, fast_systems) for s, load in loads.items()},
            GAINS_OF: [gains(loads[GAINS_OF], seed) for seed in seeds],
        }
        record(name, report["assumed"][name])
    report["overload"] = [
        record("overload", overload(s, 8 * per_device, seeds)) for s in ("S1", "S2", "S3", "S4")
    ]
    report["alone"] = {name: record(name, alone(name)) for name in BASES}
    requests = 8 * per_device
    report["sharing"] = {s: record(s, sharing(s, requests, seeds[:3])) for s in ("sd3", "dev")}
    report["degrees"] = record("degrees", degrees(requests, seeds[:3]))
    report["passed"] = {name: passed_mib(name) for name in SHAPES}
    report["loading"] = {name: loading(name) for name in BASES}
    report["chains"] = [record("chains", chained(x, 20 * per_device, seeds)) for x in LOADS]
    report["decisions"] = record("decisions", decisions())
    report["control_plane"] = control_plane()
    report["summary"] = record("summary", summary(report))
    return report


def summary(report: Report) -> Report:
    """The figures that the bars are about. Rates are medians over the seeds; names that end in
    `least` have the least.
    """
    rate_reports = [*report["rates"].values(), *report["sweeps"].values()]

    def over(figures: Report, names: Sequence[str]) -> list[float]:
        """Our rate over the best of the others, by seed. Seeds that no other system serves do not
        count.
        """
        best = [
            max(seed_rates) for seed_rates in zip(*(figures[name] for name in names), strict=True)
        ]
        return [round(o / b, 3) for o, b in zip(figures["ours"], best, strict=True) if b]

    def least_shares(figures: Report) -> float:
        other_shares = [figures[name] for name in SYSTEMS if name != "ours"]
        return float(round(figures["ours"] / max(other_shares), 3))

    at_once = [*report["shares"].values(), *report["bursts"].values()]
    over_fcfs = [item["slack"] - item["fcfs"] for item in report["chains"]]
    over_monoliths = [over(item, list(MONOLITHS)) for item in rate_reports]
    return {
        "vs_best_monolith": min(map(statistics.median, over_monoliths)),
        "vs_best_monolith_least": min(map(min, over_monoliths)),
        "vs_lego": min(
            0.9 / (statistics.median(item["lego_at_ours"]) or 0.01) for item in rate_reports
        ),
        "shares_vs_best_other": min(map(least_shares, at_once)),
        "vs_static_by_turns": min(
            statistics.median(over(item, ["static"])) for item in report["by_turns"].values()
        ),
        "twice_capacity": min(item["admission"] for item in report["overload"]),
        "twice_without": max(item["without"] for item in report["overload"]),
        "refused_wrongly": max(item["refused_wrongly"] for item in report["overload"]),
        "masks_vs_monolith": statistics.median(over(report["masks"], list(MONOLITHS))),
        "control_plane_share": max(x["share"] for x in report["control_plane"].values()),
        "control_plane_cores": max(x["cores_in_groups"] for x in report["control_plane"].values()),
        "over_fcfs_points": [round(100 * item, 1) for item in over_fcfs],
    }
