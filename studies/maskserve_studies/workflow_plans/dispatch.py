"""Which ready nodes begin now, and on which devices: the router's rule, and LegoDiffusion's.

    decide       nodes in the router's order, each at the place with the lowest score
    algorithm_1  LegoDiffusion's cycle as printed (Algorithm 1)

Order and score are the router's (`maskserve_workflows.scheduling`). Its queues hold what does not
begin: a node waits for a busy place that would finish it before any idle one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from maskserve_workflows.scheduling import NodePlace, Order, Prices, ReadyNode, least_slack

_SHARED = 0.1
"""Share of a call's seconds that does not grow with its number of nodes (Algorithm 1)."""


@dataclass(frozen=True, slots=True)
class PrintedNode(ReadyNode):
    """A ready node with what Algorithm 1 looks at."""

    depth: int = 0
    degrees_s: tuple[float, ...] = ()
    """Seconds on one device, on two, and so on."""
    together: int = 1
    """Most nodes of its models in one call."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Nodes that begin now, in one call."""

    nodes: tuple[ReadyNode, ...]
    places: tuple[str, ...]
    before_s: float
    """Seconds to fetch inputs and load models, at the slowest place."""
    run_s: float


def decide(
    ready: Iterable[ReadyNode],
    places: Sequence[NodePlace],
    prices: Prices,
    now: float,
    order: Order = least_slack,
) -> tuple[list[Dispatch], list[ReadyNode]]:
    """Choose the nodes that begin now; return them, and the nodes whose plans must be late."""
    begun: list[Dispatch] = []
    late: list[ReadyNode] = []
    places_by_name = {place.name: place for place in places}
    idle = {place.name for place in places if place.free_at <= now}
    for node in sorted(ready, key=order):
        if not node.in_time(now):
            late.append(node)
            continue
        if not idle:
            continue
        able = [
            place
            for place in places_by_name.values()
            if node.only is None or place.name in node.only
        ]
        best = min(able, key=lambda place: prices.score(node, place, now), default=None)
        if best is None or best.name not in idle:
            continue
        before_s = prices.before_s(node, best)
        begun.append(Dispatch((node,), (best.name,), before_s, node.run_s))
        places_by_name[best.name] = replace(best, free_at=now + before_s + node.run_s)
        idle.remove(best.name)
    return begun, late


def algorithm_1(
    ready: Iterable[PrintedNode], places: Sequence[NodePlace], prices: Prices, now: float
) -> Dispatch | None:
    """Run one cycle of LegoDiffusion's Algorithm 1.

    The first node by arrival and depth begins, with others of the same model, on as many idle
    devices as it can use, those with the lowest scores. None: nothing is ready, or no device is
    idle.
    """
    waiting = sorted(ready, key=lambda node: (node.arrival, node.depth, node.key))
    idle = [place for place in places if place.free_at <= now]
    if not waiting or not idle:
        return None
    head, *mates = waiting
    same_model = [node for node in mates if node.models == head.models][: head.together - 1]
    batch = (head, *same_model)
    degree = min(len(idle), len(head.degrees_s))

    def score(place: NodePlace) -> tuple[float, str]:
        return sum(prices.before_s(node, place) for node in batch), place.name

    chosen = sorted(idle, key=score)[:degree]
    run_s = head.degrees_s[degree - 1] * (_SHARED + (1.0 - _SHARED) * len(batch))
    setup_s = max(max(prices.before_s(node, place) for node in batch) for place in chosen)
    return Dispatch(batch, tuple(place.name for place in chosen), setup_s, run_s)
