"""What a router adds to an edit, and how many it passes on a second.

The worker answers at once, so nothing hides what the way costs. Calls go to the worker, through
the router, and through a proxy that does nothing but pass bytes on by grpc.aio, in turn: whatever
else the machine does, it does to all three. The proxy says what of the added time is gRPC's.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from contextlib import AsyncExitStack
from typing import Any

import grpc.aio

from maskserve_harness.cluster.fleet import proxy, router, workers
from maskserve_harness.cluster.requests import INFER, OPTIONS, edit_request, mask_of, picture

SIZES = {"1 KB": 1000, "1.5 MB": 1_500_000}
BARS_MS = {"1 KB": 2.0, "1.5 MB": 8.0}
REQUESTS_PER_S = 400.0
_CALLS = {"1 KB": 400, "1.5 MB": 120}
_LOAD_S = 5.0
_CONCURRENCY = 16
_SIDE = 64
_MASKS = 64
"""Different masks: about half of the calls have one that the router has not seen."""


def measure() -> dict[str, Any]:
    """Added milliseconds by size, and requests per second of the small ones."""
    added, rates = {}, {}
    for name, size in SIZES.items():
        with (
            workers(1, None, answer_bytes=size) as (address,),
            proxy(address) as bare,
            router([address]) as (url, _),
        ):
            requests = [
                edit_request(picture(_SIDE, size), mask_of(100 + i, _SIDE), num_inference_steps=4)
                for i in range(_MASKS)
            ]
            ways = {"direct": address, "proxy": bare, "router": url}
            added[name] = asyncio.run(_added(ways, requests, _CALLS[name]))
            if name == "1 KB":
                rates = {way: asyncio.run(_rate(ways[way], requests)) for way in ways}
    return {"added_ms": added, "requests_per_s": rates}


async def _added(ways: dict[str, str], requests: list[bytes], calls: int) -> dict[str, float]:
    """Median milliseconds of each way, and what the router's and the proxy's are above direct."""
    taken: dict[str, list[float]] = {way: [] for way in ways}
    async with AsyncExitStack() as open_channels:
        stubs = {}
        for way, address in ways.items():
            channel = grpc.aio.insecure_channel(address, OPTIONS)
            await open_channels.enter_async_context(channel)
            stubs[way] = channel.unary_unary(INFER)
        await _answered(stubs["router"], requests[0])
        for i in range(calls):
            for way, call in stubs.items():
                begin = time.perf_counter()
                await call(requests[i % len(requests)])
                taken[way].append(1e3 * (time.perf_counter() - begin))
    p50 = {way: statistics.median(times) for way, times in taken.items()}
    return {
        **{f"{way}_p50": value for way, value in p50.items()},
        "p50": p50["router"] - p50["direct"],
        "of_it_grpc": p50["proxy"] - p50["direct"],
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
