"""Processes of a router's benchmark: emulated workers, and the router in front of them."""

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
from maskserve_harness.simulator.hardware import Hardware
from maskserve_router.config import router_config_of
from maskserve_router.memory import keep_freed_memory
from maskserve_router.router import Router

_START_S = 60.0


def template_name(template: str) -> str:
    """A template of the simulator's as the wire has names: hexadecimal digits."""
    return f"{int(template[1:]):032x}"


@contextmanager
def workers(
    count: int, hardware: Hardware | None, templates: int = 0, answer_bytes: int = 100
) -> Iterator[list[str]]:
    """Emulated workers in a process of their own; their addresses.

    Args:
        count: of them.
        hardware: of each; None: edits are answered at once.
        templates: whose entries each has in its host's memory.
        answer_bytes: size of the picture that answers.
    """
    with _process(_serve_workers, count, hardware, templates, answer_bytes) as addresses:
        yield addresses


@contextmanager
def router(addresses: list[str], policy: str = "mask_aware") -> Iterator[tuple[str, str]]:
    """A router in a process of its own; its gRPC and HTTP addresses.

    It sends edits on at once, as the simulator does, and refuses none.
    """
    tables = {
        "workers": {"addresses": addresses},
        "listen": {"http_port": 0, "grpc_port": 0, "admin_port": 0},
        "routing": {"policy": policy},
        "admission": {"waiting_per_worker": 10**6, "max_edits": 10**6},
        "log": {"level": "WARNING"},
    }
    with _process(_serve_router, tables) as urls:
        yield urls


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


def _serve_workers(
    said: Queue[Any], count: int, hardware: Hardware | None, templates: int, answer_bytes: int
) -> None:
    async def serve() -> None:
        names = tuple(template_name(f"t{i}") for i in range(templates))
        every = [EmulatedWorker(f"w{i:03}", hardware, names, answer_bytes) for i in range(count)]
        for worker in every:
            await worker.start()
        said.put([worker.address for worker in every])
        await asyncio.Event().wait()

    asyncio.run(serve())


def _serve_router(said: Queue[Any], tables: dict[str, Any]) -> None:
    async def serve() -> None:
        keep_freed_memory()  # as the command does
        async with Router(router_config_of(tables)) as router:
            said.put((f"127.0.0.1:{router.grpc.port}", f"127.0.0.1:{router.http.port}"))
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
