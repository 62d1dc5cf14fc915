"""Plans of nodes over devices, in virtual time. Order, score and admission are the router's
(`maskserve_workflows.scheduling`).

A system is a way to cut requests into nodes, with rules for running them. A monolith is a plan of
one node whose single model is the whole workflow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from maskserve_benchmarks.simulator.events import Events
from maskserve_studies.workflow_plans.dispatch import Dispatch, PrintedNode, algorithm_1, decide
from maskserve_workflows.scheduling import (
    ORDERS,
    NodePlace,
    Prices,
    ReadyNode,
    admits,
    in_pieces,
    predicted_ends,
)

SETTLED = 1e-9


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a plan."""

    models: frozenset[str]
    run_s: tuple[float, ...]
    """Seconds on one device, on two, and so on. Only Algorithm 1 uses several."""
    after: tuple[int, ...] = ()
    """Numbers of the nodes before it."""
    together: int = 1
    only: frozenset[str] | None = None
    """Devices that may take it; None: all."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A request."""

    number: int
    arrival: float
    due: float
    nodes: tuple[Node, ...]
    known: int | None = None
    """Number of nodes that the scheduler knows at arrival; None: all."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of a system."""

    order: str = "slack"
    printed: bool = False
    """Use LegoDiffusion's Algorithm 1 in place of ours."""
    admission: bool = True
    """Refuse plans that would be late, and end late plans. Without it, all plans run to
    their end.
    """
    sees_plan: bool = True
    """Whether the nodes after a node are known. If not, each node comes when it is ready. Then no
    plan is refused; a plan ends when one of its nodes would be late in the queue.
    """
    swaps: bool = False
    """Whether the models of a refused request are loaded for the next one."""


@dataclass(slots=True)
class Device:
    room: int
    free_at: float = 0.0
    models: dict[str, float] = field(default_factory=dict)
    """Loaded models, each with its time of last use."""
    busy_s: float = 0.0
    loaded: int = 0
    evicted: int = 0
    """Evicted bytes."""


@dataclass(slots=True, eq=False)
class _Plan:
    request: PlanRequest
    behind: tuple[float, ...]
    depth: tuple[int, ...]
    left: list[int]
    """For each node, the number of earlier nodes that have not ended."""
    next: list[list[int]]
    """For each node, the nodes directly after it."""
    ready: dict[int, float] = field(default_factory=dict)
    """Ready nodes, each with the time since when it is ready."""
    running: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Running nodes, each with its devices."""
    finished: set[int] = field(default_factory=set)
    ended: float = math.nan
    given_up: bool = False


class PlanRun:
    """One run of a system.

    Args:
        rules: of the system.
        devices: by name, each with its first models.
        nbytes: bytes of each model.
        bytes_s: bytes loaded per second.
    """

    def __init__(
        self,
        rules: Rules,
        devices: Mapping[str, Device],
        nbytes: Mapping[str, int],
        bytes_s: float,
    ) -> None:
        self.rules, self.devices, self._nbytes = rules, devices, nbytes
        self._prices = Prices({name: size / bytes_s for name, size in nbytes.items()})
        self._order = ORDERS[rules.order]
        self._events = Events()
        self._places_by_name: dict[str, NodePlace] = {}
        for name in devices:
            self._update_place(name)
        self._under_way: dict[int, _Plan] = {}
        self.plans: list[_Plan] = []
        self.refused: list[int] = []
        self.calls, self.call_s = 0, 0.0
        self.first_bytes = {name: self._loaded_bytes(device) for name, device in devices.items()}
        self.always: frozenset[int] = frozenset()
        """Numbers of requests that are admitted regardless of the prediction."""

    def run(self, requests: Sequence[PlanRequest]) -> None:
        """Serve all requests to their end, and check what must be conserved."""
        for request in requests:
            self._events.at(request.arrival, self._arrive, request)
        self._events.run()
        self._check(requests)

    def in_time(self, requests: Sequence[PlanRequest]) -> float:
        """Share of all requests that ended by their due times."""
        return len(self.numbers_in_time()) / len(requests)

    def numbers_in_time(self) -> set[int]:
        """Numbers of the requests that ended by their due times."""
        plans = [plan for plan in self.plans if plan.ended <= plan.request.due + SETTLED]
        return {plan.request.number for plan in plans}

    def _arrive(self, now: float, request: object) -> None:
        assert isinstance(request, PlanRequest)
        plan = _plan_of(request, sees=self.rules.sees_plan)
        is_checked = (
            self.rules.admission and self.rules.sees_plan and request.number not in self.always
        )
        if is_checked and not self._admits(plan, now):
            self.refused.append(request.number)
            if self.rules.swaps:
                self._load_ahead(request.nodes[0].models, now)
            return
        self.plans.append(plan)
        self._under_way[request.number] = plan
        plan.ready.update(
            (n, now) for n, blocking_count in enumerate(plan.left) if not blocking_count
        )
        self._judge(plan, now)
        self._cycle(now)

    def _admits(self, plan: _Plan, now: float) -> bool:
        remaining_nodes = [
            node for other_plan in self._under_way.values() for node in self._left(other_plan)
        ]
        (new,) = self._left(plan) or [self._node(plan, 0, str(plan.request.number))]
        places = self._places()
        if new.only is not None and all(node.only == new.only for node in remaining_nodes):
            places = [place for place in places if place.name in new.only]
            new, *remaining_nodes = (replace(node, only=None) for node in (new, *remaining_nodes))
        return admits(new, remaining_nodes, places, self._prices, now, self._order) is not None

    def _left(self, plan: _Plan) -> list[ReadyNode]:
        """The nodes left of a plan that waits for devices. Running nodes already hold their
        devices.
        """
        request, key = plan.request, str(plan.request.number)
        known_nodes = request.nodes[: request.known]
        if len(request.nodes) == 1:
            return [self._node(plan, 0, key)] if plan.ready or not plan.running else []
        open_ = plan.ready.keys() or {
            n for n, remaining in enumerate(plan.left) if not remaining and not plan.finished
        }
        waiting = [request.nodes[n].run_s[0] + plan.behind[n] for n in open_ - plan.running.keys()]
        path = max([*waiting, *(plan.behind[n] for n in plan.running)], default=0.0)
        if not path:
            return []
        if self.rules.printed:
            return [ReadyNode(key, request.arrival, request.due, path)]
        main = max(known_nodes, key=lambda node: node.run_s[0]).only
        work = sum(
            node.run_s[0]
            for n, node in enumerate(known_nodes)
            if node.only == main and n not in plan.running and n not in plan.finished
        )
        remaining = in_pieces(key, request.arrival, request.due, path, work)
        return [replace(remaining, only=main)]

    def _node(self, plan: _Plan, number: int, key: str) -> PrintedNode:
        node, request = plan.request.nodes[number], plan.request
        return PrintedNode(
            key,
            request.arrival if self.rules.sees_plan else plan.ready[number],
            request.due if self.rules.admission else math.inf,
            node.run_s[0],
            plan.behind[number],
            node.models,
            only=node.only,
            depth=plan.depth[number],
            degrees_s=node.run_s,
            together=node.together,
        )

    def _places(self) -> list[NodePlace]:
        return list(self._places_by_name.values())

    def _update_place(self, name: str) -> None:
        """Note that a device has changed."""
        device = self.devices[name]
        self._places_by_name[name] = NodePlace(name, device.free_at, frozenset(device.models))

    def _cycle(self, now: float) -> None:
        """Start all nodes that can start."""
        if all(device.free_at > now for device in self.devices.values()):
            return
        names = {
            f"{plan.request.number}/{n}": (plan, n)
            for plan in self._under_way.values()
            for n in plan.ready
        }
        ready = {key: self._node(plan, n, key) for key, (plan, n) in names.items()}
        if self.rules.printed:
            while (
                printed_dispatch := algorithm_1(ready.values(), self._places(), self._prices, now)
            ) is not None:
                self._begin(now, printed_dispatch, names)
                for node in printed_dispatch.nodes:
                    del ready[node.key]
            return
        started_nodes, late = decide(ready.values(), self._places(), self._prices, now, self._order)
        for dispatch in started_nodes:
            self._begin(now, dispatch, names)
        for node in late:
            plan, _ = names[node.key]
            if not plan.given_up:
                self._give_up(plan, now)
        if late:  # running nodes of these plans have left their devices
            self._cycle(now)

    def _judge(self, plan: _Plan, now: float) -> None:
        """End a plan if one of its newly ready nodes would be late. Each node is judged
        by itself.
        """
        if self.rules.sees_plan or not self.rules.admission:
            return
        waiting = [
            self._node(other_plan, n, f"{other_plan.request.number}/{n}")
            for other_plan in self._under_way.values()
            for n in other_plan.ready
        ]
        ends = predicted_ends(waiting, self._places(), self._prices, now, self._order)
        new = [n for n, since in plan.ready.items() if since == now]
        if any(ends[f"{plan.request.number}/{n}"] > plan.request.due + SETTLED for n in new):
            self._give_up(plan, now)

    def _give_up(self, plan: _Plan, now: float) -> None:
        """End a plan and withdraw its running nodes."""
        plan.given_up = True
        del self._under_way[plan.request.number]
        for name in (name for names in plan.running.values() for name in names):
            device = self.devices[name]
            device.busy_s -= device.free_at - now
            self.call_s -= device.free_at - now
            device.free_at = now
            self._update_place(name)

    def _begin(
        self, now: float, dispatch: Dispatch, names: Mapping[str, tuple[_Plan, int]]
    ) -> None:
        seconds = dispatch.before_s + dispatch.run_s
        for name in dispatch.places:
            device = self.devices[name]
            if device.free_at > now:
                raise RuntimeError(f"{name} is not idle")
            self._load(device, dispatch.nodes[0].models, now)
            device.free_at = now + seconds
            device.busy_s += seconds
            self.call_s += seconds
            self._update_place(name)
        self.calls += 1
        started_nodes = [names[node.key] for node in dispatch.nodes]
        for plan, number in started_nodes:
            del plan.ready[number]
            plan.running[number] = dispatch.places
        self._events.at(now + seconds, self._ended, started_nodes)

    def _load_ahead(self, models: frozenset[str], now: float) -> None:
        """Load models that no device has, on the device that is free first."""
        if any(models <= device.models.keys() for device in self.devices.values()):
            return
        name, device = min(self.devices.items(), key=lambda item: item[1].free_at)
        seconds = sum(self._prices.load_s[model] for model in models - device.models.keys())
        self._load(device, models, now)
        device.free_at = max(device.free_at, now) + seconds
        device.busy_s += seconds
        self.call_s += seconds
        self._update_place(name)
        self._events.at(device.free_at, self._ended, [])

    def _load(self, device: Device, models: frozenset[str], now: float) -> None:
        """Load the missing models and evict the least recently used ones."""
        for model in models - device.models.keys():
            size = self._nbytes.get(model, 0)
            while self._loaded_bytes(device) + size > device.room:
                old = min(device.models.keys() - models, key=lambda name: device.models[name])
                device.evicted += self._nbytes[old]
                del device.models[old]
            device.loaded += size
            device.models[model] = now
        device.models.update(dict.fromkeys(models, now))

    def _loaded_bytes(self, device: Device) -> int:
        return sum(self._nbytes.get(model, 0) for model in device.models)

    def _ended(self, now: float, started_nodes: object) -> None:
        assert isinstance(started_nodes, list)
        for plan, number in started_nodes:
            del plan.running[number]
            plan.finished.add(number)
            if plan.given_up:
                continue
            for n in plan.next[number]:
                plan.left[n] -= 1
                if not plan.left[n]:
                    plan.ready[n] = now
            if len(plan.finished) == len(plan.request.nodes):
                plan.ended = now
                del self._under_way[plan.request.number]
            self._judge(plan, now)
        self._cycle(now)

    def _check(self, requests: Sequence[PlanRequest]) -> None:
        """Raise RuntimeError if requests, device seconds or bytes are lost or made."""
        ended = [plan for plan in self.plans if not math.isnan(plan.ended)]
        given_up = [plan for plan in self.plans if plan.given_up]
        numbers = sorted([p.request.number for p in (*ended, *given_up)] + self.refused)
        conditions = {
            "each request ends once": numbers == sorted(request.number for request in requests),
            "all nodes of what ended ran": all(
                len(plan.finished) == len(plan.request.nodes) and not plan.ready for plan in ended
            ),
            "device seconds are those of the calls": math.isclose(
                sum(device.busy_s for device in self.devices.values()), self.call_s
            ),
            "bytes are what was loaded less what went": all(
                self.first_bytes[name] + device.loaded - device.evicted
                == self._loaded_bytes(device)
                and self._loaded_bytes(device) <= device.room
                for name, device in self.devices.items()
            ),
        }
        for condition, holds in conditions.items():
            if not holds:
                raise RuntimeError(f"not so: {condition}")


def _plan_of(request: PlanRequest, *, sees: bool) -> _Plan:
    nodes, known_count = request.nodes, request.known or len(request.nodes)
    behind, depth = [0.0] * len(nodes), [0] * len(nodes)
    if sees:
        for n in reversed(range(known_count)):
            for predecessor in nodes[n].after:
                behind[predecessor] = max(behind[predecessor], nodes[n].run_s[0] + behind[n])
    for n, node in enumerate(nodes):
        depth[n] = 1 + max((depth[predecessor] for predecessor in node.after), default=-1)
    following: list[list[int]] = [[] for _ in nodes]
    for n, node in enumerate(nodes):
        for predecessor in node.after:
            following[predecessor].append(n)
    blocking_counts = [len(node.after) for node in nodes]
    return _Plan(request, tuple(behind), tuple(depth), blocking_counts, following)
