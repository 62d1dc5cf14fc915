"""LegoDiffusion's workflows (Table 2), their traffic, and the systems that serve them.

Sizes and times are the paper's if it states them (§7.3: 3.9 GiB load in 430 ms, two devices are up
to 1.9 times as fast). Otherwise they are those of the published models on such a card.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from maskserve_benchmarks.simulator.hardware import Hardware
from maskserve_benchmarks.simulator.workload import Workload, draw
from maskserve_studies.workflow_plans.simulation import Device, Node, PlanRequest, PlanRun, Rules
from maskserve_workflows.placement import ModelLoad, place

GIB: Final = 2**30
ROOM: Final = 74.0
"""GiB for weights on a card of 80 GB."""
LOAD_S: Final = 0.430 / 3.9
"""Seconds to load a GiB."""
TWO: Final = 1.9
"""Speed of two devices over one."""
OVERHEAD_S: Final = 1e-3
"""Seconds of overhead of every call, also of a monolith's. §7.5 reports less than that for the
largest fetch.
"""
SHARES: Final = (0.5, 0.3, 0.2)
"""Shares of a base's requests: without a ControlNet, with the first one, with the second one."""
TURN: Final = 10.0
"""Length of a turn in mean requests, where workflows are on by turns."""


@dataclass(frozen=True, slots=True)
class Base:
    """A base model and its parts: sizes in GiB, seconds of one call."""

    text: tuple[float, float]
    step: tuple[float, float]
    steps: int
    net: tuple[float, float]
    vae: tuple[float, float] = (0.2, 0.05)
    encoder: str = "t5"


BASES: Final = {
    "sd3": Base((10.5, 0.06), (3.9, 0.075), 28, (1.1, 0.35 * 0.075), encoder="sd3-text"),
    "sd35": Base((10.5, 0.06), (15.1, 0.35), 28, (7.6, 0.4 * 0.35), encoder="sd3-text"),
    "schnell": Base((9.1, 0.05), (22.2, 0.14), 4, (1.4, 0.06 * 0.14), encoder="flux-text"),
    "dev": Base((9.1, 0.05), (22.2, 0.14), 50, (1.4, 0.06 * 0.14), encoder="flux-text"),
}
SETTINGS: Final = {
    "S1": ("sd3",),
    "S2": ("sd35",),
    "S3": ("schnell",),
    "S4": ("dev",),
    "S5": ("sd3", "sd35"),
    "S6": ("schnell", "dev"),
}
DEVICES: Final = {"S1": 8, "S2": 8, "S3": 8, "S4": 8, "S5": 16, "S6": 16}


@dataclass(frozen=True, slots=True)
class Flow:
    """A workflow of Table 2."""

    base: str
    net: int
    """0: no ControlNet; else its number."""

    @property
    def name(self) -> str:
        return f"{self.base}+{self.net}" if self.net else self.base

    @property
    def loop_s(self) -> float:
        base = BASES[self.base]
        return base.steps * (base.step[1] + (base.net[1] if self.net else 0.0))

    @property
    def solo_s(self) -> float:
        base = BASES[self.base]
        return base.text[1] + self.loop_s + base.vae[1] + OVERHEAD_S

    @property
    def parts(self) -> dict[str, float]:
        """Sizes of its models in GiB."""
        base = BASES[self.base]
        parts = {
            base.encoder: base.text[0],
            self.base: base.step[0],
            "vae-" + self.base: base.vae[0],
        }
        return parts | ({f"{self.base}-net{self.net}": base.net[0]} if self.net else {})


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of a run, and the cards that serve them."""

    setting: str
    load: float
    """Device seconds that all requests need, over the available device seconds."""
    devices: int
    requests: int
    seed: int
    cv: float = 1.0
    scale: float = 2.0
    """Due times over the time of a dense request alone on one device."""
    turns: int = 1
    """Number of turns; each workflow is on for one of them."""
    masked: bool = False
    """Requests are masked edits of the production trace."""
    shares: tuple[float, ...] = SHARES
    """Shares of a base's requests, as in SHARES."""
    room: float = ROOM
    """GiB for weights on a device."""
    monolith_room: float | None = None
    """The part of `room` that monoliths may use; None: all."""
    load_s: float = LOAD_S
    """Seconds to load a GiB."""
    two: float = TWO
    """Speed of two devices over one, in Algorithm 1."""
    blind: bool = False
    """Whether monoliths admit all requests and run them to their end."""

    @property
    def flows(self) -> list[Flow]:
        bases, nets = SETTINGS[self.setting], range(len(self.shares))
        return [Flow(base, net) for base in bases for net in nets]

    @property
    def monolith(self) -> float:
        """GiB of the largest monolith."""
        return max(sum(flow.parts.values()) for flow in self.flows)

    @property
    def mix(self) -> dict[Flow, float]:
        """Shares of the requests. Families have equal shares of the devices' time."""
        base_s = {
            base: sum(s * Flow(base, net).solo_s for net, s in enumerate(self.shares))
            for base in SETTINGS[self.setting]
        }
        weights = {flow: self.shares[flow.net] / base_s[flow.base] for flow in self.flows}
        return {flow: weight / sum(weights.values()) for flow, weight in weights.items()}


@dataclass(frozen=True, slots=True)
class FlowRequest:
    """A request before it is cut into nodes."""

    arrival: float
    flow: Flow
    share: float = 1.0
    """Seconds of the masked loop over seconds of the dense loop."""


def draw_requests(load: Load) -> list[FlowRequest]:
    """Draw the requests. Loads that differ only in `load` give the same requests with
    other gaps.
    """
    mean = sum(share * flow.solo_s for flow, share in load.mix.items())
    rate = load.load * load.devices / mean
    rng, mix = random.Random(load.seed), load.mix
    if load.turns > 1:
        arrivals = _by_turns(load, rate, TURN * mean, rng)
    else:
        flows, weights, now_s = list(mix), list(mix.values()), 0.0
        arrivals = []
        for _ in range(load.requests):
            now_s += _gap(rng, rate, load.cv)
            arrivals.append((now_s, rng.choices(flows, weights)[0]))
    shares = _mask_shares(load.requests, load.seed) if load.masked else (1.0,) * load.requests
    return [
        FlowRequest(arrival_s, flow, share)
        for (arrival_s, flow), share in zip(arrivals, shares, strict=True)
    ]


def _gap(rng: random.Random, rate: float, cv: float) -> float:
    """Seconds to the next arrival of a gamma process."""
    shape = cv**-2
    return rng.gammavariate(shape, 1.0 / (shape * rate))


def _by_turns(load: Load, rate: float, turn: float, rng: random.Random) -> list[tuple[float, Flow]]:
    """Draw arrivals by turns. Each workflow has its own gaps, and its rate times the number of
    turns.
    """
    turns = load.turns
    arrivals = []
    for number, (flow, share) in enumerate(load.mix.items()):
        on = 0.0
        for _ in range(load.requests):
            on += _gap(rng, turns * share * rate, load.cv)
            arrivals.append((on + turn * ((turns - 1) * (on // turn) + number % turns), flow))
    return sorted(arrivals, key=lambda arrival: arrival[0])[: load.requests]


@cache
def _mask_shares(requests: int, seed: int) -> tuple[float, ...]:
    """Seconds of a step with masked rows of the production trace, over seconds of a dense step."""
    hardware = Hardware()
    dense = hardware.step_seconds(0, 0, 1)
    drawn_requests = draw(Workload(requests, 1.0, "production"), hardware.tokens, seed)
    return tuple(
        hardware.step_seconds(1, request.active, 0) / dense
        if hardware.cacheable(request.active)
        else 1.0
        for request in drawn_requests
    )


# Systems


def maskserve_system(
    load: Load, flow_requests: Sequence[FlowRequest], rules: Rules | None = None
) -> tuple[PlanRun, list[PlanRequest]]:
    """Our system: models are placed by their loads. An edit is one node on its worker, which has
    one device. A masked edit is a cached row.
    """
    plan_requests = []
    for number, request in enumerate(flow_requests):
        base = BASES[request.flow.base]
        loop, ends = request.flow.loop_s * request.share, base.text[1] + base.vae[1] + OVERHEAD_S
        node = Node(frozenset(request.flow.parts), (loop + ends,))
        plan_requests.append(_plan_request(load, number, request, (node,)))
    models = _models(load)
    return _run(rules or Rules(), load, models, _loads(load, models)), plan_requests


def lego(
    load: Load, flow_requests: Sequence[FlowRequest], rules: Rules | None = None
) -> tuple[PlanRun, list[PlanRequest]]:
    """LegoDiffusion as printed: one node for each call of a model, with a step's ControlNet beside
    it.
    """
    plan_requests = [
        _plan_request(load, n, request, _steps(request.flow, load.two))
        for n, request in enumerate(flow_requests)
    ]
    models = _models(load)
    printed = rules or Rules("fcfs", printed=True)
    return _run(printed, load, models, _loads(load, models)), plan_requests


@cache
def _steps(flow: Flow, two: float) -> tuple[Node, ...]:
    base, overhead_s = BASES[flow.base], OVERHEAD_S
    nodes = [Node(frozenset({base.encoder}), (base.text[1] + overhead_s,), together=8)]
    last: tuple[int, ...] = (0,)
    for _ in range(base.steps):
        step = base.step[1]
        behind = [len(nodes)]
        nodes.append(
            Node(frozenset({flow.base}), (step + overhead_s, step / two + overhead_s), last)
        )
        if flow.net:
            behind.append(len(nodes))
            nodes.append(
                Node(frozenset({f"{flow.base}-net{flow.net}"}), (base.net[1] + overhead_s,), last)
            )
        last = tuple(behind)
    nodes.append(
        Node(frozenset({f"vae-{flow.base}"}), (base.vae[1] + overhead_s,), last, together=4)
    )
    return tuple(nodes)


def static(load: Load, flow_requests: Sequence[FlowRequest]) -> tuple[PlanRun, list[PlanRequest]]:
    """Diffusers: each workflow has its own devices, by its share of the time.

    Raises:
        ValueError: there are fewer devices than workflows.
    """
    need = {flow: share * flow.solo_s for flow, share in load.mix.items()}
    if len(need) > load.devices:
        raise ValueError(f"{len(need)} workflows on {load.devices} devices")
    counts = dict.fromkeys(need, 1)
    while sum(counts.values()) < load.devices:
        counts[max(need, key=lambda flow: need[flow] / counts[flow])] += 1
    names = iter(f"d{n}" for n in range(load.devices))
    placed = {next(names): frozenset({flow.name}) for flow, k in counts.items() for _ in range(k)}
    return _monolith(load, flow_requests, placed, bound=True)


def swapped(load: Load, flow_requests: Sequence[FlowRequest]) -> tuple[PlanRun, list[PlanRequest]]:
    """Diffusers-C: any device loads a workflow on demand, as Clockwork does."""
    return _monolith(
        load,
        flow_requests,
        dict.fromkeys(_rooms(load.room, load.devices), frozenset()),
        bound=False,
    )


def planned(load: Load, flow_requests: Sequence[FlowRequest]) -> tuple[PlanRun, list[PlanRequest]]:
    """Diffusers-S: workflows are placed by their loads, as Shepherd plans, and stay there."""
    models = [
        ModelLoad(flow.name, _nbytes(flow), share * flow.solo_s) for flow, share in load.mix.items()
    ]
    placed = _placed(tuple(models), _of_monoliths(load).room, load.devices)
    return _monolith(load, flow_requests, placed, bound=True)


MONOLITHS: Final = {"static": static, "swapped": swapped, "planned": planned}
SYSTEMS: Final = {**MONOLITHS, "lego": lego, "ours": maskserve_system}


def _monolith(
    load: Load,
    flow_requests: Sequence[FlowRequest],
    placed: dict[str, frozenset[str]],
    *,
    bound: bool,
) -> tuple[PlanRun, list[PlanRequest]]:
    plan_requests = []
    for number, request in enumerate(flow_requests):
        name = request.flow.name
        only = (
            frozenset(d for d, placed_models in placed.items() if name in placed_models)
            if bound
            else None
        )
        node = Node(frozenset({name}), (request.flow.solo_s,), only=only)
        plan_requests.append(_plan_request(load, number, request, (node,)))
    sizes = {flow.name: _nbytes(flow) for flow in load.flows}
    rules = Rules("fcfs", admission=not load.blind, swaps=not bound)
    return _run(rules, _of_monoliths(load), sizes, placed), plan_requests


def _of_monoliths(load: Load) -> Load:
    return replace(load, room=load.monolith_room or load.room)


def _plan_request(
    load: Load, number: int, flow_request: FlowRequest, nodes: tuple[Node, ...]
) -> PlanRequest:
    return PlanRequest(
        number,
        flow_request.arrival,
        flow_request.arrival + load.scale * flow_request.flow.solo_s,
        nodes,
    )


def _nbytes(flow: Flow) -> int:
    return int(sum(flow.parts.values()) * GIB)


def _models(load: Load) -> dict[str, int]:
    return {name: int(size * GIB) for flow in load.flows for name, size in flow.parts.items()}


def _loads(load: Load, models: dict[str, int]) -> dict[str, frozenset[str]]:
    """Model placement for these loads. The calls of an encoder and decoder count in the base's
    time.
    """
    need = dict.fromkeys(models, 0.0)
    for flow, share in load.mix.items():
        for name in flow.parts:
            need[name] += share * flow.solo_s
    loads = [ModelLoad(name, size, need[name]) for name, size in models.items()]
    return _placed(tuple(loads), load.room, load.devices)


@cache
def _placed(models: tuple[ModelLoad, ...], room: float, devices: int) -> dict[str, frozenset[str]]:
    return place(models, _rooms(room, devices))


def _rooms(room: float, devices: int) -> dict[str, int]:
    return {f"d{n}": int(room * GIB) for n in range(devices)}


def _run(
    rules: Rules, load: Load, sizes: dict[str, int], placed: dict[str, frozenset[str]]
) -> PlanRun:
    devices = {
        name: Device(room, models=dict.fromkeys(placed[name], 0.0))
        for name, room in _rooms(load.room, load.devices).items()
    }
    return PlanRun(rules, devices, sizes, GIB / load.load_s)


def in_time(system: str, load: Load) -> float:
    """The share of a load's requests that a system has in time; 0 if its models do not fit."""
    flow_requests = draw_requests(load)
    try:
        run, plan_requests = SYSTEMS[system](load, flow_requests)
    except ValueError:
        return 0.0
    run.run(plan_requests)
    return run.in_time(plan_requests)


def rate(system: str, load: Load, seeds: Sequence[int], steps: int = 5) -> float:
    """The highest load at which a system has nine of ten requests in time; 0: not even at 0.05."""
    return most(system, lambda value: replace(load, load=value), (0.05, 12.8), seeds, steps)


def most(
    system: str,
    of: Callable[[float], Load],
    bounds: tuple[float, float],
    seeds: Sequence[int],
    steps: int = 5,
) -> float:
    """How far a load may grow until a system has fewer than nine of ten requests in time.

    Args:
        system: its name.
        of: the load for a value of the growing quantity.
        bounds: of that value.
        seeds: the shares in time are their mean.
        steps: halvings of the last doubling; 5 find the value to within 2 %.

    Returns:
        A value within the bounds; 0: not even the lower bound.
    """

    def met(value: float) -> bool:
        loads = [replace(of(value), seed=seed) for seed in seeds]
        return sum(in_time(system, load) for load in loads) >= 0.9 * len(seeds)

    low, end = bounds
    if not met(low):
        return 0.0
    while (high := min(2 * low, end)) > low and met(high):
        low = high
    for _ in range(steps if high > low else 0):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if met(middle) else (low, middle)
    return low
