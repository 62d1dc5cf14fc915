"""The choice of ready nodes to run, and of their places: data in, decisions out.

    Prices.score  the seconds until a node would be done at a place
    admits        whether a new plan can be in time (§5.3)
    predicted     when each plan would end
    decide        least slack first, the place with the lowest score, as many devices as the due
                  time needs, none that others wait for
    algorithm_1   LegoDiffusion's cycle as printed (Algorithm 1)

A node's *slack* is the time that its plan's due time leaves beside its own seconds and those of the
nodes after it. Its score at a place is fetch + load + queue + run: the seconds to bring its inputs
and models there, of the place's remaining work, and of the node itself.

The router orders calls by slack, admits plans, and scores node servers at measured prices
(`live_placement`). It scores workers for edits by `maskserve_common.routing`, which prices steps.
Its admission counts no loads, because these go on while a plan's earlier nodes run. `decide` and
`algorithm_1` are the simulator's, whose devices are all alike and are all the scheduler's.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

TOLERANCE_S: Final = 1e-9


@dataclass(frozen=True, slots=True)
class ReadyNode:
    """A node whose inputs are complete."""

    key: str
    arrival: float
    """Arrival time of the plan."""
    depth: int
    due: float
    """Due time of the plan; infinite: none."""
    run_s: tuple[float, ...]
    """Seconds on one device, on two, and so on."""
    chain_s: float = 0.0
    """Seconds of the longest chain of nodes after this one."""
    models: frozenset[str] = frozenset()
    inputs: Mapping[str, int] = field(default_factory=dict)
    """Bytes of inputs, by the place that has them."""
    only: Set[str] | None = None
    """Places that may run it; None: all."""
    at_once: int = 1
    """Number of equal calls that are ready together."""
    together: int = 1
    """Most nodes of its models in one call."""

    @property
    def latest_start(self) -> float:
        """The latest time to begin on one device so that the plan is in time."""
        return self.due - self.chain_s - self.run_s[0]

    def in_time(self, start: float, degree: int) -> bool:
        """Return True if the plan can be in time when the node begins at `start`."""
        return start + self.run_s[degree - 1] + self.chain_s <= self.due + TOLERANCE_S


def in_pieces(key: str, arrival: float, due: float, path_s: float, work_s: float) -> ReadyNode:
    """Return the rest of a plan as one node.

    Args:
        key: key of the plan.
        arrival: its arrival time.
        due: its due time.
        path_s: seconds of its remaining critical path.
        work_s: seconds of all its remaining calls; as many run at once as fit into the path.
    """
    pieces = max(1, math.ceil(work_s / path_s - 1e-6)) if path_s else 1
    piece_s = work_s / pieces
    return ReadyNode(key, arrival, 0, due, (piece_s,), max(path_s - piece_s, 0.0), at_once=pieces)


@dataclass(frozen=True, slots=True)
class NodePlace:
    """A device."""

    name: str
    free_at: float
    models: frozenset[str] = frozenset()
    """Models that are loaded there."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Nodes that begin now, in one call."""

    nodes: tuple[ReadyNode, ...]
    places: tuple[str, ...]
    before_s: float
    """Seconds to fetch inputs and load models, at the slowest place."""
    run_s: float


@dataclass(frozen=True, slots=True)
class Prices:
    """Measured costs of models and links."""

    load_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds to load each model."""
    byte_s: float = 0.0
    """Seconds to fetch a byte from another place."""
    shared: float = 0.1
    """Share of a call's seconds that does not grow with its number of nodes."""

    def before_s(self, node: ReadyNode, place: NodePlace) -> float:
        """Return the seconds until a place has a node's inputs and models."""
        fetched = sum(size for name, size in node.inputs.items() if name != place.name)
        loads = sum(self.load_s.get(model, 0.0) for model in node.models - place.models)
        return self.byte_s * fetched + loads

    def score(self, node: ReadyNode, place: NodePlace, now: float) -> float:
        """Return the seconds until a node would be done at a place, on one device."""
        return self.before_s(node, place) + max(place.free_at - now, 0.0) + node.run_s[0]


Order = Callable[[ReadyNode], tuple[float | str, ...]]


def least_slack(node: ReadyNode) -> tuple[float | str, ...]:
    """Order by the latest start; nodes without a due time come last, by arrival."""
    return (node.latest_start, *arrival_order(node))


def arrival_order(node: ReadyNode) -> tuple[float | str, ...]:
    """Order by the plan's arrival, then by depth."""
    return (node.arrival, node.depth, node.key)


ORDERS: Final[Mapping[str, Order]] = MappingProxyType({"slack": least_slack, "fcfs": arrival_order})


def decide(
    ready: Iterable[ReadyNode],
    places: Sequence[NodePlace],
    prices: Prices,
    now: float,
    order: Order = least_slack,
) -> tuple[list[Dispatch], list[ReadyNode]]:
    """Choose the nodes that begin now; return them, and the nodes whose plans must be late.

    A node waits for a busy place that would finish it before any idle one. It gets as many devices
    as its due time needs, and more only while over half of them are idle and nobody waits.
    """
    begun: list[Dispatch] = []
    late: list[ReadyNode] = []
    waiting = sorted(ready, key=order)
    places_by_name = {place.name: place for place in places}
    for ahead, node in enumerate(waiting):
        if not node.in_time(now, _fastest(node)):
            late.append(node)
            continue
        idle = [place for place in places_by_name.values() if place.free_at <= now]
        if not idle:
            continue
        chosen = _chosen(node, places_by_name.values(), idle, len(waiting) - ahead - 1, prices, now)
        if not chosen:
            continue
        setup_s = max(prices.before_s(node, place) for place in chosen)
        run = node.run_s[len(chosen) - 1]
        begun.append(Dispatch((node,), tuple(place.name for place in chosen), setup_s, run))
        for place in chosen:
            places_by_name[place.name] = replace(place, free_at=now + setup_s + run)
    return begun, late


def _chosen(
    node: ReadyNode,
    places: Iterable[NodePlace],
    idle: Sequence[NodePlace],
    position: int,
    prices: Prices,
    now: float,
) -> list[NodePlace]:
    """Choose the places where a node begins now; none if it has to wait."""
    able = [place for place in places if node.only is None or place.name in node.only]
    if not able or min(able, key=lambda place: prices.score(node, place, now)) not in idle:
        return []
    ranked = sorted(
        (place for place in idle if place in able), key=lambda place: prices.score(node, place, now)
    )
    most = min(len(ranked), len(node.run_s))
    start = now + prices.before_s(node, ranked[0])
    degree = next((k for k in range(1, most + 1) if node.in_time(start, k)), most)
    spare = len(idle) - position
    if degree < most <= spare and 2 * len(idle) > len(list(places)):
        degree = most
    return ranked[:degree]


def algorithm_1(
    ready: Iterable[ReadyNode], places: Sequence[NodePlace], prices: Prices, now: float
) -> Dispatch | None:
    """Run one cycle of LegoDiffusion's Algorithm 1.

    The first node by arrival and depth begins, with others of the same model, on as many idle
    devices as it can use, those with the lowest scores. None: nothing is ready, or no device is
    idle.
    """
    waiting = sorted(ready, key=arrival_order)
    idle = [place for place in places if place.free_at <= now]
    if not waiting or not idle:
        return None
    head, *mates = waiting
    same_model = [node for node in mates if node.models == head.models][: head.together - 1]
    batch = (head, *same_model)
    degree = min(len(idle), len(head.run_s))

    def score(place: NodePlace) -> tuple[float, str]:
        return sum(prices.before_s(node, place) for node in batch), place.name

    chosen = sorted(idle, key=score)[:degree]
    shared = prices.shared
    run = head.run_s[degree - 1] * (shared + (1.0 - shared) * len(batch))
    setup_s = max(max(prices.before_s(node, place) for node in batch) for place in chosen)
    return Dispatch(batch, tuple(place.name for place in chosen), setup_s, run)


def predicted(
    left: Iterable[ReadyNode],
    places: Sequence[NodePlace],
    prices: Prices,
    now: float,
    order: Order = least_slack,
) -> dict[str, float]:
    """Predict when plans end, by list scheduling of the rest of each.

    Args:
        left: the rest of each plan as one node, with the seconds of its remaining critical path;
            `at_once` of its calls run in parallel.
        places: the devices.
        prices: costs of loads.
        now: the present time.
        order: order in which plans are scheduled.
    """
    nodes = sorted(left, key=order)
    if _alike(nodes, places):
        return _listed(nodes, [place.free_at for place in places], now)
    ends: dict[str, float] = {}
    free = {place.name: max(place.free_at, now) for place in places}
    loaded = {place.name: place.models for place in places}
    for node in nodes:
        end = now + node.chain_s
        able = [name for name in free if node.only is None or name in node.only]
        for _ in range(node.at_once):
            starts = [
                (free[name] + prices.before_s(node, NodePlace(name, 0.0, loaded[name])), name)
                if node.inputs or not node.models <= loaded[name]
                else (free[name], name)
                for name in able
            ]
            if not starts:
                end = math.inf
                break
            start, name = min(starts)
            helpers = [helper for helper in able if helper != name and free[helper] <= start]
            most = min(len(node.run_s), len(helpers) + 1)
            degree = next((k for k in range(1, most) if node.in_time(start, k)), most)
            end_s = start + node.run_s[degree - 1]
            for helper in (name, *helpers[: degree - 1]):
                free[helper], loaded[helper] = end_s, loaded[helper] | node.models
            end = max(end, end_s + node.chain_s)
        ends[node.key] = end
    return ends


def _alike(nodes: Sequence[ReadyNode], places: Sequence[NodePlace]) -> bool:
    """Return True if all places have all models, so that any place serves any node."""
    required_models: frozenset[str] = frozenset().union(*(node.models for node in nodes))
    return all(node.only is None for node in nodes) and all(
        required_models <= place.models for place in places
    )


def _listed(nodes: Sequence[ReadyNode], free: Iterable[float], now: float) -> dict[str, float]:
    """Return when each node's plan would end, by list scheduling on equal places."""
    ends: dict[str, float] = {}
    heap = [max(at, now) for at in free]
    heapq.heapify(heap)
    for node in nodes:
        end = now + node.chain_s
        for _ in range(node.at_once):
            start, gang = heapq.heappop(heap), 1
            while gang < len(node.run_s) and not node.in_time(start, gang):
                if not heap or heap[0] > start:
                    break
                heapq.heappop(heap)
                gang += 1
            end_s = start + node.run_s[gang - 1]
            for _ in range(gang):
                heapq.heappush(heap, end_s)
            end = max(end, end_s + node.chain_s)
        ends[node.key] = end
    return ends


def admits(
    new: ReadyNode,
    admitted: Sequence[ReadyNode],
    places: Sequence[NodePlace],
    prices: Prices,
    now: float,
    order: Order = least_slack,
) -> float | None:
    """Return when a new plan would end, or None if it must not be admitted.

    It is admitted if it is in time and makes no plan late that was in time. Arguments are those of
    `predicted`.
    """
    ends = predicted([*admitted, new], places, prices, now, order)
    if ends[new.key] > new.due + TOLERANCE_S:
        return None
    late = [node for node in admitted if ends[node.key] > node.due + TOLERANCE_S]
    if late:
        ends_without = predicted(admitted, places, prices, now, order)
        if any(ends_without[node.key] <= node.due + TOLERANCE_S for node in late):
            return None
    return ends[new.key]


def _fastest(node: ReadyNode) -> int:
    return min(range(1, len(node.run_s) + 1), key=lambda k: node.run_s[k - 1])
