"""Policies in real time: emulated workers behind a real router, against the simulator.

Both serve the same edits at the same times on the same hardware. The device is taken to be
`speed` times as fast as it is, and the edits come as much faster: a run is as much shorter, and
what the router and the machine add weighs as much more.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio
import msgspec
import numpy as np
from tritonclient.grpc import service_pb2 as pb

from maskserve_harness.cluster.fleet import router, template_name, workers
from maskserve_harness.cluster.requests import INFER, OPTIONS, edit_request, mask_of
from maskserve_harness.simulator.capacity import at_load
from maskserve_harness.simulator.hardware import Hardware
from maskserve_harness.simulator.result import run
from maskserve_harness.simulator.scenario import Scenario
from maskserve_harness.simulator.workload import Request, Workload, draw
from maskserve_router.upstream import control_request

POLICIES = ("round_robin", "least_requests", "least_tokens", "mask_aware")
WORKERS = 8
_TAIL_S = 120.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run."""

    edits: int
    loads: tuple[float, ...] = (0.8, 0.95)
    policies: tuple[str, ...] = POLICIES
    mix: str = "public"
    speed: float = 4.0
    seed: int = 1


EMULATED = Hardware(entry_format="int8", stride=4, dense_above_ratio=0.6)
"""What the figures in docs/benchmarks.md were taken with."""


def hardware_at(speed: float) -> Hardware:
    """An H100 that is `speed` times as fast."""
    return replace(EMULATED, dense_seconds=EMULATED.step_seconds(0, 0, 1) / speed)


def measure(plan: Plan) -> dict[str, Any]:
    """`policies[name][load]`: figures of the run, of the simulator, and how far they are apart.

    Seconds are those of the real device: what was measured, times the speed.
    """
    hardware = hardware_at(plan.speed)
    figures: dict[str, dict[str, Any]] = {name: {} for name in plan.policies}
    for load in plan.loads:
        scenario = at_load(
            Scenario(Workload(plan.edits, 1.0, plan.mix, ring=0), workers=WORKERS), hardware, load
        )
        requests = draw(scenario.workload, hardware.tokens, plan.seed)
        for name in plan.policies:
            simulated, _ = run(replace(scenario, policy=name), hardware, plan.seed)
            with (
                workers(WORKERS, hardware, scenario.workload.templates) as addresses,
                router(addresses, name) as (url, _),
            ):
                latencies, lost, error = asyncio.run(_serve(url, requests, hardware))
            first = int(scenario.warmup * len(requests))
            real = _figures(latencies[first:], plan.speed)
            virtual = {
                key: getattr(simulated, key) * plan.speed for key in ("mean", "p50", "p95", "p99")
            }
            figures[name][f"{load:g}"] = {
                **real,
                "lost": lost,
                "prediction_error": error,
                "simulated": virtual,
                "off": {key: real[key] / virtual[key] - 1.0 for key in virtual},
            }
    return figures


def _figures(latencies: list[float], speed: float) -> dict[str, float]:
    seconds = np.array(latencies) * speed
    return {
        "mean": float(seconds.mean()),
        "p50": float(np.percentile(seconds, 50)),
        "p95": float(np.percentile(seconds, 95)),
        "p99": float(np.percentile(seconds, 99)),
    }


async def _serve(
    url: str, requests: list[Request], hardware: Hardware
) -> tuple[list[float], int, dict[str, float]]:
    """Send each edit when it is due, whatever became of those before; seconds of each, how many
    were not answered, and how far the router's predictions were off.
    """
    side = round(hardware.tokens**0.5)
    taken = [float("nan")] * len(requests)
    lost = 0
    async with grpc.aio.insecure_channel(url, OPTIONS) as channel:
        call = channel.unary_unary(INFER)
        await asyncio.sleep(1.0)  # the router has asked every worker

        async def edit(place: int, request: Request, due: float) -> None:
            nonlocal lost
            raw = edit_request(
                b"",
                mask_of(request.active, side),
                template_id=template_name(request.template),
                num_inference_steps=request.steps,
            )
            try:
                await call(raw, timeout=_TAIL_S)
                taken[place] = time.perf_counter() - due
            except grpc.aio.AioRpcError:
                lost += 1

        start = time.perf_counter()
        tasks = []
        for place, request in enumerate(requests):
            due = start + request.arrival
            await asyncio.sleep(max(due - time.perf_counter(), 0.0))
            tasks.append(asyncio.create_task(edit(place, request, due)))
        await asyncio.gather(*tasks)
        answer = pb.ModelInferResponse.FromString(await call(control_request({"op": "status"})))
    error = msgspec.json.decode(answer.raw_output_contents[0][4:])["prediction"]
    return [seconds for seconds in taken if seconds == seconds], lost, error
