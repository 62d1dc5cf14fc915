"""Plans with due times at the real router, compared with single edits and with the simulator.

Eight workers and two node servers are emulated in this process (real gRPC, the step scheduler, a
row at a time, an H100's times). The router is the product's own process. `replace`, `detail`,
`outline` and `variants` come by a Poisson process. Each one is due at twice its longest chain:

slack    runs of the shipped plans: their admission, due times of nodes, least slack first
fcfs     the same requests by a script each, `[routing] order = "fcfs"`, also at workers. Each
         edit is due when its run is, and is admitted by itself

Both orders get the same arrivals. So does the simulator (`workflow_plans/simulation.py`), which
knows all masks when a request comes. Edits wait at the router (`waiting_per_worker = 0`).
Predictions are used without slack (`deadline_slack = 1`).
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean, quantiles
from typing import Any, Final

import grpc
import grpc.aio
import numpy as np
import psutil
from tritonclient.grpc import service_pb2 as pb

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.emulator.server import SERVICE
from maskserve_benchmarks.emulator.worker import EmulatedWorker
from maskserve_benchmarks.router_site import RouterSite
from maskserve_benchmarks.simulator.hardware import Hardware
from maskserve_client import wire
from maskserve_common.contracts import bytes_tensor
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.imaging.images import encode_png
from maskserve_studies.workflow_plans.chains import (
    KINDS,
    NODES,
    RULES,
    SECONDS,
    WORKERS,
    Request,
    draw_chains,
    simulate_chains,
    square,
)
from maskserve_studies.workflows.node_server import EmulatedNodes
from maskserve_workflows.folder import read_plans
from maskserve_workflows.node_types import EDIT, ENCODE
from maskserve_workflows.nodes import NODE_TYPES
from maskserve_workflows.run import Task, WorkflowRun, seed_of
from maskserve_workflows.values import Areas, Judgement

Figures = dict[str, Any]
LOADS: Final = (0.8, 1.2, 1.6)
"""Loads as a share of the rate of eight workers."""
_LATE_S: Final = 0.02
"""Beyond this lateness of the event loop, or this share of a core, this process or the router was
the bottleneck of the run.
"""
_BUSY: Final = 0.75


class _Worker(EmulatedWorker):
    def picture(self, settings: EditSettings) -> bytes:
        """A different picture for each seed, so that no two calls of nodes are equal."""
        return b"picture %d" % (settings.seed or 0)


class Cluster:
    """The emulated servers and the router in front of them."""

    def __init__(self, order: str, hardware: Hardware) -> None:
        self.order = order
        self.workers = [
            _Worker(name, hardware, ("0" * 32,), max_rows=1, order=order) for name in WORKERS
        ]
        self.nodes = [EmulatedNodes(SECONDS, self.outputs_of) for _ in NODES]
        self.plans = {plan.name: plan for plan in read_plans(CHECKOUT / "assets" / "workflows")}
        self.requests: dict[str, Request] = {}
        self._verdicts = Counter[str]()
        """Calls of `shows` by the request's name."""
        self._picture = encode_png(np.zeros((64, 64, 3), np.uint8))
        self._turn = 0
        self.infer: Callable[[pb.ModelInferRequest], Any]
        self.router: psutil.Process

    def outputs_of(self, node: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs of a node."""
        match node:
            case "find":  # `split` gets the request's name, and `replace` paints the mask
                request = self.requests[inputs["name"]]
                return {
                    "mask": request.masks[0] if request.kind == "replace" else request.name.encode()
                }
            case "split":
                masks = self.requests[inputs["mask"].decode()].masks
                return {"regions": Areas(masks, (0,) * len(masks))}
            case "shows":
                request = self.requests[inputs["name"]]
                self._verdicts[request.name] += 1
                last = self._verdicts[request.name] > (request.tries - 1) * len(request.edits)
                return {"verdict": Judgement(1.0, last)}
            case "best":
                passed = [verdict.passed for verdict in inputs["verdicts"]]
                return {"picture": inputs["pictures"][0], "verdict": Judgement(1.0, any(passed))}
        return {"picture": inputs["picture"]}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Cluster]:
        async with AsyncExitStack() as exit_stack:
            servers: list[EmulatedWorker | EmulatedNodes] = [*self.workers, *self.nodes]
            for server in servers:
                await server.start()
                exit_stack.push_async_callback(server.stop)
            folder = Path(exit_stack.enter_context(tempfile.TemporaryDirectory()))
            site = RouterSite(
                [worker.address for worker in self.workers],
                folder,
                {
                    "workflows": {
                        "folder": str(CHECKOUT / "assets" / "workflows"),
                        "nodes": [server.address for server in self.nodes],
                    },
                    "routing": {"order": self.order},
                    "admission": {"deadline_slack": 1.0, "waiting_per_worker": 0},
                },
            )
            # It blocks, and waits for servers of this event loop.
            exit_stack.push_async_callback(asyncio.to_thread, site.stop)
            await asyncio.to_thread(site.start)
            self.router = psutil.Process(site.pid)
            channel = await exit_stack.enter_async_context(grpc.aio.insecure_channel(site.grpc_url))
            await channel.channel_ready()
            self.infer = channel.unary_unary(
                f"/{SERVICE}/ModelInfer",
                request_serializer=pb.ModelInferRequest.SerializeToString,
                response_deserializer=pb.ModelInferResponse.FromString,
            )
            yield self

    async def run(self, request: Request, due_s: float, *, scripted: bool) -> bool:
        """Whether the request is answered in time."""
        self.requests[request.name] = request
        end = time.monotonic() + due_s
        try:
            async with asyncio.timeout(due_s):
                if scripted:
                    await self._script(request, end)
                else:
                    inputs = self._inputs(request)
                    call = wire.workflow(request.kind, inputs, {"deadline_ms": round(1e3 * due_s)})
                    await self.infer(call.request)
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            if isinstance(error, TimeoutError) or error.code() in (
                grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
            ):  # fmt: skip
                return False
            raise
        return True

    def _inputs(self, request: Request) -> dict[str, Any]:
        values = {"mask": request.masks[0], "name": request.name, "prompt": request.name}
        names = [plan_input.name for plan_input in self.plans[request.kind].inputs]
        return {name: values.get(name, self._picture) for name in names}

    async def _script(self, request: Request, end: float) -> None:
        """Run the plan like a client's script: the router gets edits, and node servers get nodes.
        A script does not encode ahead: each of its edits does so itself.
        """
        machine = WorkflowRun(self.plans[request.kind], self._inputs(request))
        calls: dict[asyncio.Task[dict[str, Any]], Task] = {}
        try:
            while not machine.ended:
                for task in machine.ready():
                    coroutine = (
                        self._edited(task, request, end)
                        if task.call.node == EDIT
                        else self._node(task)
                    )
                    calls[asyncio.create_task(coroutine)] = task
                finished_calls, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
                for call in finished_calls:
                    machine.complete(calls.pop(call).key, call.result())
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def _node(self, task: Task) -> dict[str, Any]:
        if task.call.node == ENCODE:
            return dict.fromkeys(NODE_TYPES[ENCODE].outputs, b"")
        self._turn += 1
        return await self.nodes[self._turn % len(self.nodes)].run(task.call.node, task.inputs)

    async def _edited(self, task: Task, request: Request, end: float) -> dict[str, Any]:
        settings = {
            **task.call.settings,
            "seed": seed_of(request.number, task.key),
            "deadline_ms": max(1, round(1e3 * (end - time.monotonic()))),
        }
        control = [task.inputs["control"]] if "control" in task.inputs else []
        return {"picture": await self.edit(task.inputs["mask"], request.name, settings, control)}

    async def edit(
        self, mask: bytes, prompt: str, settings: Figures, control: Sequence[bytes] = ()
    ) -> bytes:
        """The answer to one edit of the picture."""
        answer = await self.infer(wire.edit(self._picture, mask, prompt, settings, control).request)
        return bytes(bytes_tensor.outputs(answer)["IMAGE"])


async def _measure(cluster: Cluster, requests: Sequence[Request]) -> Figures:
    """Send all requests at their arrival times."""
    scripted = cluster.order == "fcfs"
    # The router learns the picture's template from an edit that is dense in any case. Then it
    # learns the durations of nodes and edits.
    await cluster.edit(square(64), "", {"seed": 0})
    warm = [
        replace(item, number=number, tries=1)
        for number, item in enumerate(requests[:24], len(requests))
    ]
    if not all(
        await asyncio.gather(*(cluster.run(item, 60.0, scripted=scripted) for item in warm))
    ):
        raise RuntimeError("not all of the first requests were answered")
    late: list[float] = []

    async def look() -> None:
        while True:
            wakeup_s = time.monotonic() + 0.02
            await asyncio.sleep(0.02)
            late.append(time.monotonic() - wakeup_s)

    lateness_task = asyncio.create_task(look())
    processes = {"router": cluster.router, "emulators": psutil.Process()}
    cpu_before = {name: sum(item.cpu_times()[:2]) for name, item in processes.items()}
    begin, runs = time.monotonic(), []
    for item in requests:
        await asyncio.sleep(begin + item.at - time.monotonic())
        runs.append(asyncio.create_task(cluster.run(item, item.due_s, scripted=scripted)))
    in_time = await asyncio.gather(*runs)
    seconds = time.monotonic() - begin
    lateness_task.cancel()
    share = {
        name: round((sum(item.cpu_times()[:2]) - cpu_before[name]) / seconds, 3)
        for name, item in processes.items()
    }
    p99 = quantiles(late, n=100)[98]
    by_kind = {
        kind: round(mean(m for m, r in zip(in_time, requests, strict=True) if r.kind == kind), 3)
        for kind in KINDS
    }
    return {
        "in_time": round(mean(in_time), 3),
        "by_kind": by_kind,
        "seconds": round(seconds, 1),
        "cores": share,
        "late_ms_p99": round(1e3 * p99, 1),
        "bottleneck": p99 > _LATE_S or max(share.values()) > _BUSY,
    }


async def _both_orders(requests: Sequence[Request], hardware: Hardware) -> Figures:
    figures: Figures = {}
    for order, rules in RULES.items():
        async with Cluster(order, hardware).running() as cluster:
            figures[order] = await _measure(cluster, requests)
        figures[order]["simulated"] = round(simulate_chains(requests, rules), 3)
        print(order, json.dumps(figures[order]), flush=True)
    return figures


def due_plans(count: int, seeds: Sequence[int], loads: Sequence[float] = LOADS) -> Figures:
    """Run `count` requests of each seed at each load in each order.

    Returns:
        `over_fcfs_points`: share in time with plans less share edit by edit, at each load by seed;
        `due_apart_points`: measured less simulated; `due_bottlenecks`: runs in which this machine
            was too slow; `seconds_due`: all figures by load, order and seed.
    """
    hardware = Hardware()
    figures: dict[str, dict[str, list[Figures]]] = {}
    for load in loads:
        figures[f"{load:g}"] = {order: [] for order in RULES}
        for seed in seeds:
            print(f"load {load:g}, seed {seed}", flush=True)
            order_figures = asyncio.run(
                _both_orders(draw_chains(count, load, seed, hardware), hardware)
            )
            for order, runs in figures[f"{load:g}"].items():
                runs.append(order_figures[order])

    def points(one: float, other: float) -> float:
        return round(100 * (one - other), 1)

    return {
        "over_fcfs_points": {
            load: [
                points(slack["in_time"], fcfs["in_time"])
                for slack, fcfs in zip(by_order["slack"], by_order["fcfs"], strict=True)
            ]
            for load, by_order in figures.items()
        },
        "due_apart_points": {
            load: {
                order: [points(run["in_time"], run["simulated"]) for run in runs]
                for order, runs in by_order.items()
            }
            for load, by_order in figures.items()
        },
        "due_bottlenecks": sum(
            run["bottleneck"]
            for by_order in figures.values()
            for runs in by_order.values()
            for run in runs
        ),
        "seconds_due": figures,
    }
