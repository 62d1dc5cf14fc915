"""The order of waiting nodes, the price of a place, and admission: data in, decisions out.

    ORDERS          least slack first, or by arrival
    Prices.score    the seconds until a node would be done at a place
    admits          whether a new plan can be in time (§5.3)
    predicted_ends  when each plan would end

A node's *slack* is the time that its plan's due time leaves beside its own seconds and those of the
nodes after it. Its score at a place is fetch + load + queue + run: the seconds to bring its inputs
and models there, of the place's remaining work, and of the node itself.

Router and simulator use all four. The router scores node servers at measured prices
(`live_placement`). It scores workers for edits by `maskserve_common.routing`, which prices steps
and gives the same order where rows are alike. Its admission counts no loads, because these go on
while a plan's earlier nodes run.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

TOLERANCE_S: Final = 1e-9


@dataclass(frozen=True, slots=True)
class ReadyNode:
    """A node whose inputs are complete."""

    key: str
    arrival: float
    """Arrival time of the plan."""
    due: float
    """Due time of the plan; infinite: none."""
    run_s: float
    """Seconds of the node itself."""
    chain_s: float = 0.0
    """Seconds of the longest chain of nodes after this one."""
    models: frozenset[str] = frozenset()
    inputs: Mapping[str, int] = field(default_factory=dict)
    """Bytes of inputs, by the place that has them."""
    only: Set[str] | None = None
    """Places that may run it; None: all."""
    at_once: int = 1
    """Number of equal calls that are ready together."""

    @property
    def latest_start(self) -> float:
        """The latest time to begin so that the plan is in time."""
        return self.due - self.chain_s - self.run_s

    def in_time(self, start: float) -> bool:
        """Return True if the plan can be in time when the node begins at `start`."""
        return start + self.run_s + self.chain_s <= self.due + TOLERANCE_S


def in_pieces(key: str, arrival: float, due: float, path_s: float, work_s: float) -> ReadyNode:
    """Return what remains of a plan as one node: equal calls that run at the same time.

    There are as many calls as the path must hold for all work to fit: `work_s / path_s`, rounded
    up. So scheduling sees how many devices the plan takes, and for how long.

    Args:
        key: key of the plan.
        arrival: arrival time of the plan.
        due: due time of the plan.
        path_s: seconds of the longest chain of calls that remain.
        work_s: seconds of all calls that remain.
    """
    pieces = max(1, math.ceil(work_s / path_s - 1e-6)) if path_s else 1
    piece_s = work_s / pieces
    return ReadyNode(key, arrival, due, piece_s, max(path_s - piece_s, 0.0), at_once=pieces)


@dataclass(frozen=True, slots=True)
class NodePlace:
    """A device, or a server of nodes."""

    name: str
    free_at: float
    models: frozenset[str] = frozenset()
    """Models that are loaded there."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Measured costs of models and links."""

    load_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds to load each model."""
    byte_s: float = 0.0
    """Seconds to fetch a byte from another place."""

    def before_s(self, node: ReadyNode, place: NodePlace) -> float:
        """Return the seconds until a place has a node's inputs and models."""
        fetched = sum(size for name, size in node.inputs.items() if name != place.name)
        loads = sum(self.load_s.get(model, 0.0) for model in node.models - place.models)
        return self.byte_s * fetched + loads

    def score(self, node: ReadyNode, place: NodePlace, now: float) -> float:
        """Return the seconds until a node would be done at a place."""
        return self.before_s(node, place) + max(place.free_at - now, 0.0) + node.run_s


Order = Callable[[ReadyNode], tuple[float | str, ...]]


def least_slack(node: ReadyNode) -> tuple[float | str, ...]:
    """Order by the latest start; nodes without a due time come last, by arrival."""
    return (node.latest_start, *arrival_order(node))


def arrival_order(node: ReadyNode) -> tuple[float | str, ...]:
    """Order by the plan's arrival."""
    return (node.arrival, node.key)


ORDERS: Final[Mapping[str, Order]] = MappingProxyType({"slack": least_slack, "fcfs": arrival_order})


def predicted_ends(
    remaining: Iterable[ReadyNode],
    places: Sequence[NodePlace],
    prices: Prices,
    now: float,
    order: Order = least_slack,
) -> dict[str, float]:
    """Predict when plans end, by list scheduling of the rest of each.

    Args:
        remaining: the rest of each plan as one node, with the seconds of its remaining critical
            path; `at_once` of its calls run in parallel.
        places: the devices.
        prices: costs of loads.
        now: the present time.
        order: order in which plans are scheduled.
    """
    nodes = sorted(remaining, key=order)
    if _places_are_alike(nodes, places):
        return _list_schedule(nodes, [place.free_at for place in places], now)
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
            free[name], loaded[name] = start + node.run_s, loaded[name] | node.models
            end = max(end, free[name] + node.chain_s)
        ends[node.key] = end
    return ends


def _places_are_alike(nodes: Sequence[ReadyNode], places: Sequence[NodePlace]) -> bool:
    """Return True if all places have all models and no node has inputs at one of them, so that any
    place serves any node.
    """
    required_models: frozenset[str] = frozenset().union(*(node.models for node in nodes))
    return all(node.only is None and not node.inputs for node in nodes) and all(
        required_models <= place.models for place in places
    )


def _list_schedule(
    nodes: Sequence[ReadyNode], free: Iterable[float], now: float
) -> dict[str, float]:
    """Return when each node's plan would end, by list scheduling on equal places."""
    ends: dict[str, float] = {}
    heap = [max(at, now) for at in free]
    heapq.heapify(heap)
    for node in nodes:
        end = now + node.chain_s
        for _ in range(node.at_once):
            end_s = heap[0] + node.run_s
            heapq.heapreplace(heap, end_s)
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
    `predicted_ends`.
    """
    ends = predicted_ends([*admitted, new], places, prices, now, order)
    if ends[new.key] > new.due + TOLERANCE_S:
        return None
    late = [node for node in admitted if ends[node.key] > node.due + TOLERANCE_S]
    if late:
        ends_without = predicted_ends(admitted, places, prices, now, order)
        if any(ends_without[node.key] <= node.due + TOLERANCE_S for node in late):
            return None
    return ends[new.key]
