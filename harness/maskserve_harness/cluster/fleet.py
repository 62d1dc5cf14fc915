"""Processes of the router's benchmark: an emulated worker, a router and a proxy."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.queues import Queue
from typing import Any

import grpc
import grpc.aio

from maskserve_harness.cluster.emulated import EmulatedWorker
from maskserve_harness.cluster.requests import INFER, OPTIONS
from maskserve_router.config import router_config_of
from maskserve_router.memory import keep_freed_memory
from maskserve_router.router import Router

_START_S = 60.0


@contextmanager
def worker(answer: bytes) -> Iterator[str]:
    """A worker in a process of its own that answers at once, with these bytes as the picture; its
    gRPC address.
    """
    with _process(_serve_worker, answer) as address:
        yield address


@contextmanager
def router(address: str) -> Iterator[str]:
    """A router in a process of its own in front of one worker, which refuses nothing; its gRPC
    address.
    """
    tables = {
        "workers": {"addresses": [address]},
        "listen": {"http_port": 0, "grpc_port": 0, "admin_port": 0},
        "admission": {"waiting_per_worker": 10**6, "max_edits": 10**6},
        "log": {"level": "WARNING"},
    }
    with _process(_serve_router, tables) as url:
        yield url


@contextmanager
def proxy(address: str) -> Iterator[str]:
    """A process that passes bytes on to `address` and does nothing else; its gRPC address."""
    with _process(_serve_proxy, address) as url:
        yield url


@contextmanager
def _process(serve: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """A process that serves until the block is left; what it put into its queue first."""
    context = multiprocessing.get_context("spawn")
    said: Queue[Any] = context.Queue()
    process = context.Process(target=serve, args=(said, *arguments), daemon=True)
    process.start()
    try:
        yield said.get(timeout=_START_S)
    finally:
        process.terminate()
        process.join()


def _serve_worker(said: Queue[Any], answer: bytes) -> None:
    async def serve() -> None:
        worker = EmulatedWorker("w000", None, answer=answer)
        await worker.start()
        said.put(worker.address)
        await asyncio.Event().wait()

    asyncio.run(serve())


def _serve_router(said: Queue[Any], tables: dict[str, Any]) -> None:
    async def serve() -> None:
        keep_freed_memory()  # as the command does
        async with Router(router_config_of(tables)) as router:
            said.put(f"127.0.0.1:{router.grpc.port}")
            await asyncio.Event().wait()

    asyncio.run(serve())


def _serve_proxy(said: Queue[Any], address: str) -> None:
    async def serve() -> None:
        async with grpc.aio.insecure_channel(address, OPTIONS) as channel:
            send = channel.unary_unary(INFER)

            async def pass_on(raw: bytes, _: object) -> bytes:
                answer: bytes = await send(raw)
                return answer

            server = grpc.aio.server(options=OPTIONS)
            service, method = INFER.strip("/").split("/")
            handlers = {method: grpc.unary_unary_rpc_method_handler(pass_on)}
            server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(service, handlers),)
            )
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            said.put(f"127.0.0.1:{port}")
            await asyncio.Event().wait()

    asyncio.run(serve())
