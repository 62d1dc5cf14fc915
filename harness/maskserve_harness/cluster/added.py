"""What a router adds to an edit, and how many it passes on a second.

The worker answers at once, so nothing hides what the way costs. Calls go to the worker and
through the router in turn: whatever else the machine does, it does to both.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

import grpc.aio

from maskserve_harness.cluster.fleet import router, workers
from maskserve_harness.cluster.requests import INFER, OPTIONS, edit_request, mask_of, picture

SIZES = {"1 KB": 1000, "1.5 MB": 1_500_000}
BARS_MS = {"1 KB": 2.0, "1.5 MB": 8.0}
REQUESTS_PER_S = 400.0
_CALLS = {"1 KB": 400, "1.5 MB": 120}
_LOAD_S = 5.0
_CONCURRENCY = 16
_SIDE = 64
_MASKS = 64
"""Different masks and pictures, so that each is decoded as often as real ones are."""


def measure() -> dict[str, Any]:
    """Added milliseconds by size, and requests per second of the small ones."""
    added, rates = {}, {}
    for name, size in SIZES.items():
        with workers(1, None, answer_bytes=size) as addresses, router(addresses) as (url, _):
            requests = [
                edit_request(picture(_SIDE, size), mask_of(100 + i, _SIDE), num_inference_steps=4)
                for i in range(_MASKS)
            ]
            added[name] = asyncio.run(_added(addresses[0], url, requests, _CALLS[name]))
            if name == "1 KB":
                rates = {
                    "direct": asyncio.run(_rate(addresses[0], requests)),
                    "router": asyncio.run(_rate(url, requests)),
                }
    return {"added_ms": added, "requests_per_s": rates}


async def _added(direct: str, routed: str, requests: list[bytes], calls: int) -> dict[str, float]:
    """Median milliseconds of each way, and the difference of the two."""
    async with (
        grpc.aio.insecure_channel(direct, OPTIONS) as near,
        grpc.aio.insecure_channel(routed, OPTIONS) as far,
    ):
        ways = {"direct": near.unary_unary(INFER), "router": far.unary_unary(INFER)}
        taken: dict[str, list[float]] = {way: [] for way in ways}
        await _answered(ways["router"], requests[0])
        for i in range(calls):
            for way, call in ways.items():
                begin = time.perf_counter()
                await call(requests[i % len(requests)])
                taken[way].append(1e3 * (time.perf_counter() - begin))
    p50 = {way: statistics.median(times) for way, times in taken.items()}
    p95 = {way: statistics.quantiles(times, n=20)[18] for way, times in taken.items()}
    return {
        "direct_p50": p50["direct"],
        "router_p50": p50["router"],
        "p50": p50["router"] - p50["direct"],
        "p95": p95["router"] - p95["direct"],
    }


async def _answered(call: Any, request: bytes) -> None:
    """Wait until the router has found its worker."""
    for _ in range(100):
        try:
            await call(request)
            return
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.1)
    raise RuntimeError("the router does not serve")


async def _rate(url: str, requests: list[bytes]) -> float:
    """Requests answered per second, so many under way at a time."""
    done = 0
    async with grpc.aio.insecure_channel(url, OPTIONS) as channel:
        call = channel.unary_unary(INFER)
        end = time.perf_counter() + _LOAD_S

        async def client(first: int) -> None:
            nonlocal done
            number = first
            while time.perf_counter() < end:
                await call(requests[number % len(requests)])
                number += _CONCURRENCY
                done += 1

        await asyncio.gather(*(client(i) for i in range(_CONCURRENCY)))
    return done / _LOAD_S
