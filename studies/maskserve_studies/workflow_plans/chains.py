"""Requests for the shipped plans, for the simulator and for an emulated cluster.

The requests are `replace`, `detail`, `outline` and `variants` of masked edits. They run on eight
workers of one row each and two node servers. They come by a Poisson process. Each one is due at
twice its longest chain. For `variants` only the first try is known at arrival.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import mean
from typing import Final

import numpy as np

from maskserve_benchmarks.simulator.hardware import STEPS, Hardware
from maskserve_benchmarks.simulator.workload import draw_gaps
from maskserve_common.config import LimitsConfig
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.contracts.status_record import Served
from maskserve_router.scheduling.edit_cost import count_tokens
from maskserve_studies.workflow_plans.simulation import Device, Node, PlanRequest, PlanRun, Rules
from maskserve_workflows.pictures import encode_mask

WORKERS: Final = tuple(f"w{n}" for n in range(8))
NODES: Final = ("n0", "n1")
SECONDS: Final[Mapping[str, float]] = {
    "find": 0.06, "split": 0.005, "compose": 0.02, "outline": 0.02, "enlarge": 0.25, "shows": 0.02,
    "best": 0.001,
}  # fmt: skip
KINDS: Final[Mapping[str, float]] = {
    "replace": 0.35,
    "detail": 0.25,
    "outline": 0.2,
    "variants": 0.2,
}
RULES: Final = {"slack": Rules(), "fcfs": Rules("fcfs", sees_plan=False)}
"""`slack`: plans are admitted and their nodes go by least slack. `fcfs`: each edit comes by itself,
and waits.
"""
_SCALE: Final = 2.0
"""Due times over the duration of the longest chain."""
_DILATE: Final = 4
"""Mask dilation of `replace` and `detail`."""
_TRIES: Final = 3
_PASSES: Final = 0.9
"""Share of the tries of `variants` that pass."""
_ROOM: Final = LimitsConfig()


@dataclass(frozen=True)
class Request:
    """A request and its outcome."""

    number: int
    at: float
    kind: str
    masks: tuple[bytes, ...]
    """Masks of its edits that run side by side; all eight of `variants`."""
    edits: tuple[float, ...]
    """Seconds of these edits."""
    tries: int = 1

    @property
    def name(self) -> str:
        """The request's text; emulated nodes identify the request by it."""
        return str(self.number)

    @property
    def stages(self) -> list[tuple[tuple[str, ...], Sequence[float]]]:
        """(devices, seconds of the nodes that run side by side) for each stage in order."""

        def at(*nodes: str) -> tuple[tuple[str, ...], Sequence[float]]:
            return NODES, [SECONDS[node] for node in nodes]

        edits = (WORKERS, self.edits)
        match self.kind:
            case "replace":
                return [at("find"), edits]
            case "detail":
                return [at("find"), at("split"), edits, at("compose")]
            case "outline":
                return [at("outline"), edits, at("enlarge")]
        return self.tries * [edits, at(*["shows"] * len(self.edits)), at("best")]

    @property
    def known(self) -> int:
        """Number of stages that are known at arrival; for `variants` those of the first try."""
        return len(self.stages) // self.tries

    @property
    def due_s(self) -> float:
        return _SCALE * sum(max(seconds) for _, seconds in self.stages[: self.known])

    def plan_request(self) -> PlanRequest:
        """The request in the simulator's form."""
        nodes: list[Node] = []
        last: tuple[int, ...] = ()
        for devices, seconds in self.stages:
            only, first = frozenset(devices), len(nodes)
            nodes += [Node(frozenset(), (duration_s,), last, only=only) for duration_s in seconds]
            last = tuple(range(first, len(nodes)))
        known_nodes = len(nodes) // self.tries
        return PlanRequest(self.number, self.at, self.at + self.due_s, tuple(nodes), known_nodes)


@lru_cache
def square(side: int) -> bytes:
    """A mask of 64 x 64 with a square of this side."""
    white = np.zeros((64, 64), np.bool_)
    white[:side, :side] = True
    return encode_mask(white)


def _edit(hardware: Hardware, ratio: float, dilate: int) -> tuple[bytes, float]:
    """A mask that with its dilation has about this share of the picture, and its edit's seconds."""
    mask = square(max(1, round(64 * ratio**0.5) - dilate))
    settings, served = EditSettings(mask_dilate=dilate), Served(64, 1, STEPS)
    active = count_tokens(mask, settings, served, _ROOM).active
    return mask, STEPS * hardware.step_seconds(1, active, 0)


def draw_chains(count: int, load: float, seed: int, hardware: Hardware) -> list[Request]:
    """Draw requests. Loads that differ give the same requests with other gaps.

    Args:
        count: of requests.
        load: as a share of the workers' rate.
        seed: of the random draws.
        hardware: of the workers.
    """
    rng, requests = random.Random(seed), list[Request]()
    for number, kind in enumerate(rng.choices(list(KINDS), list(KINDS.values()), k=count)):
        ratio = min(0.6, max(0.03, rng.betavariate(1.2, 6.0)))
        tries = 1
        while kind == "variants" and tries < _TRIES and rng.random() > _PASSES:
            tries += 1
        match kind:
            case "detail":
                parts = [ratio * rng.uniform(0.4, 1.0) for _ in range(rng.randint(2, 5))]
                edits = [_edit(hardware, part, _DILATE) for part in parts]
            case "replace":
                edits = [_edit(hardware, ratio, _DILATE)]
            case _:
                edits = [_edit(hardware, ratio, 0)] * (8 if kind == "variants" else 1)
        masks, seconds = zip(*edits, strict=True)
        requests.append(Request(number, 0.0, kind, masks, seconds, tries))
    work = mean(request.tries * sum(request.edits) for request in requests)
    gaps = draw_gaps(load * len(WORKERS) / work, count, np.random.default_rng(seed))
    return [
        replace(request, at=float(at))
        for request, at in zip(requests, np.cumsum(gaps), strict=True)
    ]


def simulate_chains(requests: Sequence[Request], rules: Rules) -> float:
    """The share in time."""
    plan_requests = [request.plan_request() for request in requests]
    run = PlanRun(rules, {name: Device(0) for name in (*WORKERS, *NODES)}, {}, 1.0)
    run.run(plan_requests)
    return run.in_time(plan_requests)
