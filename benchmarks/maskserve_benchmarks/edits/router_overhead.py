"""Measure the time that a router adds to an edit, and the edits that it passes on per second.

    python scripts/bench router --json docs/benchmarks/router.json

The worker answers at once, so that no other work hides the router's time. Calls to the worker,
calls through the router, and calls through a proxy that only passes bytes on by grpc.aio take
turns, so that other load on the machine affects all three. The proxy shows gRPC's part of the added
time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import numpy as np
from tritonclient.grpc import service_pb2 as pb

from maskserve_benchmarks.emulator.server import SERVICE, server_of
from maskserve_benchmarks.emulator.worker import EmulatedWorker
from maskserve_benchmarks.machine import machine
from maskserve_benchmarks.reports import about, table, write_json
from maskserve_benchmarks.router_site import RouterSite
from maskserve_common.contracts import bytes_tensor
from maskserve_common.imaging.images import encode_png

SIZES: Final = {"1 KB": 1_000, "1.5 MB": 1_500_000}
"""Bytes of the picture in the request and in the response."""
BARS_MS: Final = {"1 KB": 2.0, "1.5 MB": 8.0}
REQUESTS_PER_S: Final = 400.0
IN_FLIGHT: Final = 16
PATHS: Final = ("direct", "proxy", "router")
_INFER: Final = f"/{SERVICE}/ModelInfer"
_OPTIONS: Final = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
_CALLS: Final = {"1 KB": 400, "1.5 MB": 120}
_LOAD_S: Final = 5.0
_START_S: Final = 60.0
_SIDE: Final = 64
_MASKS: Final = 64
"""Number of different masks: about half of the calls have a mask that is new to the router."""
_ADMISSION: Final = {"waiting_per_worker": 10**6, "max_edits": 10**6}

Figures = dict[str, Any]


def picture_of(size: int) -> bytes:
    """Return a small PNG of `size` bytes; a chunk that decoders skip fills it up."""
    plain = encode_png(np.zeros((_SIDE, _SIDE, 3), np.uint8))
    chunk = b"prVt" + bytes(max(size - len(plain) - 12, 0))
    length, check = struct.pack(">I", len(chunk) - 4), struct.pack(">I", zlib.crc32(chunk))
    return plain[:-12] + length + chunk + check + plain[-12:]


def edit_request(picture: bytes, active: int) -> bytes:
    """Return a request to `edit`.

    Args:
        picture: picture bytes, sent unchanged.
        active: number of masked pixels.
    """
    mask = np.zeros(_SIDE * _SIDE, np.uint8)
    mask[:active] = 255
    inputs = {
        "IMAGE": picture,
        "MASK": encode_png(mask.reshape(_SIDE, _SIDE)),
        "PROMPT": b"a red star",
        "SETTINGS": b'{"num_inference_steps": 4}',
    }
    message = pb.ModelInferRequest(model_name="edit")
    for name, value in inputs.items():
        bytes_tensor.add_input(message, name, [value])
    encoded: bytes = message.SerializeToString()
    return encoded


@contextmanager
def process_of(serve: Callable[..., Any], *arguments: Any) -> Iterator[str]:
    """Run a process that serves while the context lasts; yield its gRPC address.

    Args:
        serve: a coroutine function of a queue for the address, and of `arguments`.
        *arguments: further arguments of `serve`.
    """
    context = multiprocessing.get_context("spawn")
    addresses: Queue[str] = context.Queue()
    process = context.Process(target=_run, args=(serve, addresses, arguments), daemon=True)
    process.start()
    try:
        yield addresses.get(timeout=_START_S)
    finally:
        process.terminate()
        process.join()


def _run(serve: Callable[..., Any], addresses: Queue[str], arguments: Sequence[Any]) -> None:
    asyncio.run(serve(addresses, *arguments))


async def serve_worker(addresses: Queue[str], answer: bytes) -> None:
    """Run a worker that responds at once with these bytes as the picture."""
    worker = EmulatedWorker("w000", None, answer=answer)
    await worker.start()
    addresses.put(worker.address)
    await asyncio.Event().wait()


async def serve_proxy(addresses: Queue[str], address: str) -> None:
    """Run a proxy that only passes bytes on to an address."""
    async with grpc.aio.insecure_channel(address, _OPTIONS) as channel:
        send = channel.unary_unary(_INFER)

        async def pass_on(raw: bytes, _: object) -> bytes:
            answer: bytes = await send(raw)
            return answer

        handler = grpc.unary_unary_rpc_method_handler(pass_on)
        server, port = server_of({"ModelInfer": handler})
        await server.start()
        addresses.put(f"127.0.0.1:{port}")
        await asyncio.Event().wait()


def measure(calls: dict[str, int], load_s: float) -> Figures:
    """Measure the added milliseconds by size, and requests per second of the small ones.

    Args:
        calls: number of calls of each way, by size.
        load_s: seconds under load.
    """
    added, rates = Figures(), Figures()
    for name, size in SIZES.items():
        requests = [edit_request(picture_of(size), 100 + n) for n in range(_MASKS)]
        with (
            process_of(serve_worker, bytes(size)) as address,
            process_of(serve_proxy, address) as proxy_address,
            tempfile.TemporaryDirectory() as folder,
            RouterSite([address], Path(folder), {"admission": dict(_ADMISSION)}) as site,
        ):
            addresses = dict(zip(PATHS, (address, proxy_address, site.grpc_url), strict=True))
            added[name] = asyncio.run(_added(addresses, requests, calls[name]))
            if name == "1 KB":
                rates = {
                    path: round(asyncio.run(_rate(addresses[path], requests, load_s)), 1)
                    for path in PATHS
                }
    return {"added_ms": added, "requests_per_s": rates}


async def _added(addresses: dict[str, str], requests: Sequence[bytes], calls: int) -> Figures:
    """Return the median milliseconds of each way, and the difference of router and proxy to direct
    calls.
    """
    times: dict[str, list[float]] = {path: [] for path in addresses}
    async with AsyncExitStack() as channels:
        stubs = {}
        for path, address in addresses.items():
            channel = grpc.aio.insecure_channel(address, _OPTIONS)
            await channels.enter_async_context(channel)
            stubs[path] = channel.unary_unary(_INFER)
        for number in range(calls):
            for path, call in stubs.items():
                begin = time.perf_counter()
                await call(requests[number % len(requests)])
                times[path].append(1e3 * (time.perf_counter() - begin))
    p50 = {path: statistics.median(samples) for path, samples in times.items()}
    figures = {f"{path}_p50": value for path, value in p50.items()}
    figures |= {"p50": p50["router"] - p50["direct"], "of_it_grpc": p50["proxy"] - p50["direct"]}
    return {name: round(value, 3) for name, value in figures.items()}


async def _rate(address: str, requests: Sequence[bytes], load_s: float) -> float:
    """Return requests answered per second, with `IN_FLIGHT` requests in flight."""
    answered = 0
    async with grpc.aio.insecure_channel(address, _OPTIONS) as channel:
        call = channel.unary_unary(_INFER)
        end = time.perf_counter() + load_s

        async def client(first: int) -> None:
            nonlocal answered
            number = first
            while time.perf_counter() < end:
                await call(requests[number % len(requests)])
                number += IN_FLIGHT
                answered += 1

        await asyncio.gather(*(client(n) for n in range(IN_FLIGHT)))
    return answered / load_s


def bars(report: Figures) -> list[str]:
    """Return a sentence for each bar that the figures miss."""
    missed = [
        f"{size}: {figures['p50']:.1f} ms are added, above {BARS_MS[size]:g}"
        for size, figures in report["added_ms"].items()
        if figures["p50"] > BARS_MS[size]
    ]
    rate = report["requests_per_s"]["router"]
    if rate < REQUESTS_PER_S:
        missed.append(f"{rate:.0f} requests a second, below {REQUESTS_PER_S:.0f}")
    return missed


def lines(report: Figures) -> str:
    """Return the figures as they appear in docs/benchmarks.md."""
    rows = [
        [
            f"{size} (p50)",
            *(f"{figures[f'{path}_p50']:.2f} ms" for path in PATHS),
            f"**{figures['p50']:.2f} ms**",
            f"{BARS_MS[size]:g} ms",
        ]
        for size, figures in report["added_ms"].items()
    ]
    direct, proxy, router = (f"{report['requests_per_s'][path]:.0f}/s" for path in PATHS)
    under_load = [f"1 KB, {IN_FLIGHT} at a time", direct, proxy, f"**{router}**", ""]
    rows.append([*under_load, f"{REQUESTS_PER_S:g}/s"])
    columns = ["request and answer", *PATHS, "added by the router", "bar"]
    return table(columns, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the calls")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--show", type=Path, metavar="FILE", help="the table of a file; no run")
    args = parser.parse_args()
    if args.show:
        print(lines(json.loads(args.show.read_text(encoding="utf-8"))))
        return 0
    part = 10 if args.quick else 1
    calls = {size: count // part for size, count in _CALLS.items()}
    report = {**about(machine()), **measure(calls, _LOAD_S / part)}
    missed = report["missed"] = bars(report)
    write_json(report, args.json)
    print(lines(report), *(f"MISSED: {sentence}" for sentence in missed), sep="\n")
    return 1 if missed else 0
