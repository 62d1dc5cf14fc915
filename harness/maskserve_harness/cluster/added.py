"""What a router adds to an edit, and how many it passes on a second.

    python scripts/bench router --json docs/benchmarks/router.json

The worker answers at once, so nothing hides what the way costs. Calls go to the worker, through
the router, and through a proxy that does nothing but pass bytes on by grpc.aio, in turn: whatever
else the machine does, it does to all three. The proxy says what of the added time is gRPC's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from contextlib import AsyncExitStack
from datetime import date
from pathlib import Path
from typing import Any

import grpc.aio

from maskserve_harness.benchmarks.machine import machine
from maskserve_harness.cluster.fleet import proxy, router, worker
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


def main() -> int:
    """Measure, tell, and hold the figures to the bars."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write all figures here")
    add("--show", type=Path, metavar="FILE", help="print the table of a figures file; no run")
    options = parser.parse_args()
    if options.show:
        print(table(json.loads(options.show.read_text())))
        return 0
    report = {
        "command": " ".join(["python", *sys.argv]),
        "hardware": machine(),
        "date": date.today().isoformat(),
        **measure(),
    }
    missed = report["missed"] = bars(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    print(table(report), *(f"MISSED: {sentence}" for sentence in missed), sep="\n")
    return 1 if missed else 0


def bars(report: dict[str, Any]) -> list[str]:
    """Sentences, one for each bar that the figures miss."""
    missed = [
        f"{size}: {figures['p50']:.1f} ms are added, above {BARS_MS[size]}"
        for size, figures in report["added_ms"].items()
        if figures["p50"] > BARS_MS[size]
    ]
    rate = report["requests_per_s"]["router"]
    if rate < REQUESTS_PER_S:
        missed.append(f"{rate:.0f} requests a second, below {REQUESTS_PER_S:.0f}")
    return missed


def table(report: dict[str, Any]) -> str:
    """The figures as docs/benchmarks.md has them."""
    lines = [
        "| request and answer | direct | proxy | router | added by the router | bar |",
        "|---|---|---|---|---|---|",
    ]
    for size, f in report["added_ms"].items():
        lines.append(
            f"| {size} (p50) | {f['direct_p50']:.2f} ms | {f['proxy_p50']:.2f} ms "
            f"| {f['router_p50']:.2f} ms | **{f['p50']:.2f} ms** | {BARS_MS[size]:g} ms |"
        )
    rates = report["requests_per_s"]
    lines.append(
        f"| 1 KB, 16 at a time | {rates['direct']:.0f}/s | {rates['proxy']:.0f}/s "
        f"| **{rates['router']:.0f}/s** | | {REQUESTS_PER_S:g}/s |"
    )
    return "\n".join(lines)


def measure() -> dict[str, Any]:
    """Added milliseconds by size, and requests per second of the small ones."""
    added, rates = {}, {}
    for name, size in SIZES.items():
        with (
            worker(answer=bytes(size)) as address,
            proxy(address) as bare,
            router(address) as url,
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
