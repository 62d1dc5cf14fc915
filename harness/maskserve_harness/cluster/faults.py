"""Harm to a cluster under load: two real workers behind a router, every answer judged."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from maskserve_core.worker.liveness import signed_in
from maskserve_harness.cluster.judged_load import (
    PATIENCE_S,
    Customer,
    Known,
    Tally,
    known_edits,
    leave,
    stay,
)
from maskserve_harness.cluster.site import RouterSite
from maskserve_harness.soaking.load import Load
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor
from maskserve_serving.worker import WorkerProcess

_BACK_S = 240.0
"""A worker that is not back by then will not come."""
TABLES: dict[str, dict[str, object]] = {
    "admission": {"max_edits": 48},
    "http": {"header_timeout_s": 3.0, "max_body_bytes": 8 * 2**20},
}


@dataclass(frozen=True, slots=True)
class Cluster:
    """What harm is done to."""

    supervisor: Supervisor
    site: RouterSite
    edits: list[Known]

    @property
    def victim(self) -> WorkerProcess:
        return self.supervisor.workers[0]

    def process(self, model: str) -> psutil.Process:
        """The victim's process that serves `model`, or its server itself."""
        if model == "tritonserver":
            return psutil.Process(self.victim.pid)
        for name, pid in signed_in(self.victim.spec.files.runtime):
            if name == model:
                return psutil.Process(pid)
        raise LookupError(f"no process serves {model}")

    def ready_workers(self) -> int:
        """As the router says."""
        with suppress(OSError, ValueError):
            page = self.site.read("/metrics").decode()
            lines = [one for one in page.splitlines() if one.startswith("maskserve_worker_up{")]
            return sum(float(line.rpartition(" ")[2]) == 1.0 for line in lines)
        return 0


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of harm."""

    name: str
    harm: Callable[[Cluster], Awaitable[None]]
    seconds: float = 6.0
    """How long the load goes on after the harm has been done."""
    clients: int = 8
    leaving: float = 0.0


async def _kill_denoiser(cluster: Cluster) -> None:
    cluster.process("denoiser").kill()


async def _kill_triton(cluster: Cluster) -> None:
    cluster.process("tritonserver").kill()


async def _kill_router(cluster: Cluster) -> None:
    cluster.site.kill()
    await asyncio.sleep(0.5)
    await asyncio.to_thread(cluster.site.start)


async def _freeze(cluster: Cluster) -> None:
    """Stop the whole server for a while, or until somebody gives it up."""
    server = cluster.process("tritonserver")
    server.suspend()
    await asyncio.sleep(8.0)
    with suppress(psutil.NoSuchProcess):
        server.resume()


async def _drain_and_restart(cluster: Cluster) -> None:
    address = cluster.victim.grpc_url
    await asyncio.to_thread(cluster.site.read, f"/workers/{address}/drain?wait=60", post=True)
    server = cluster.process("tritonserver")
    server.send_signal(signal.SIGTERM)
    await asyncio.to_thread(server.wait, 60)
    await asyncio.to_thread(cluster.site.read, f"/workers/{address}/resume", post=True)


async def _nothing(cluster: Cluster) -> None:
    pass


async def _slow_and_large(cluster: Cluster) -> None:
    """Clients that send headers a byte at a time, and bodies over the bound."""
    head = b"POST /v2/models/edit/infer HTTP/1.1\r\nHost: x\r\n"
    slow = [_connect(cluster.site.http_url) for _ in range(20)]
    large = [_connect(cluster.site.http_url) for _ in range(5)]
    for connection in large:
        connection.sendall(head + b"Content-Length: 99999999\r\n\r\n" + bytes(4096))
    for byte in head[:40]:
        for connection in slow:
            with suppress(OSError):
                connection.sendall(bytes([byte]))
        await asyncio.sleep(0.1)
    for connection in (*slow, *large):
        connection.close()


async def _random_bytes(cluster: Cluster) -> None:
    for _ in range(50):
        for url in (cluster.site.http_url, cluster.site.grpc_url):
            with suppress(OSError), _connect(url) as connection:
                connection.sendall(os.urandom(4096))
        await asyncio.sleep(0.02)


def _connect(url: str) -> socket.socket:
    host, _, port = url.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)


def faults(overload_s: float = 60.0) -> list[Fault]:
    """All of them; the order leaves time for a worker to come back."""
    return [
        Fault("denoiser killed", _kill_denoiser),
        Fault("tritonserver killed", _kill_triton),
        Fault("tritonserver stopped for 8 s", _freeze),
        Fault("drained and restarted", _drain_and_restart),
        Fault("router killed and started again", _kill_router),
        Fault("clients that leave at random", _nothing, seconds=15.0, leaving=0.4),
        Fault("ten times too many clients", _nothing, seconds=overload_s, clients=160),
        Fault("slow headers, large bodies", _slow_and_large),
        Fault("random bytes on both ports", _random_bytes),
    ]


@asynccontextmanager
async def _running(model: Path, folder: Path) -> Any:
    options = ServeOptions(
        model=str(model), workers=2, base_port=free_base_port(2), log_dir=folder, say=lambda _: None
    )
    supervisor = Supervisor(options)
    await asyncio.to_thread(supervisor.start)
    try:
        urls = [worker.grpc_url for worker in supervisor.workers]
        edits = await asyncio.to_thread(known_edits, urls, 128, 6)
        with RouterSite(urls, folder, TABLES) as site:
            yield Cluster(supervisor, site, edits)
    finally:
        await asyncio.to_thread(supervisor.stop, 5)


async def measure(model: Path, chosen: list[Fault], tell: Callable[[dict[str, Any]], None]) -> None:
    """Do each harm under load, and tell what became of the edits."""
    with tempfile.TemporaryDirectory() as name:
        async with _running(model, Path(name)) as cluster:
            for fault in chosen:
                tell(await try_fault(cluster, fault))


async def try_fault(cluster: Cluster, fault: Fault) -> dict[str, Any]:
    """One harm under load, and the time until both workers serve again."""
    await _both_ready(cluster)
    site = cluster.site
    before = psutil.Process(site.pid).memory_info().rss
    tally = Tally()
    customers = [
        Customer(random.Random(i), cluster.edits, tally, site.grpc_url, site.http_url, i % 2 == 1)
        for i in range(fault.clients)
    ]
    load = Load(customers, {stay: 1 - fault.leaving, leave: fault.leaving}, tally)
    most = before
    load.start()
    try:
        await asyncio.sleep(1.0)
        begin = time.monotonic()
        await fault.harm(cluster)
        end = time.monotonic() + fault.seconds
        while time.monotonic() < end:
            await asyncio.sleep(0.2)
            most = max(most, psutil.Process(site.pid).memory_info().rss)
    finally:
        await asyncio.to_thread(load.stop, 2 * PATIENCE_S)
    await _both_ready(cluster)
    return {
        "fault": fault.name,
        "clients": fault.clients,
        **tally.to_json(),
        "whole_again_s": round(time.monotonic() - begin, 1),
        "router_mib": [round(before / 2**20), round(most / 2**20)],
    }


async def _both_ready(cluster: Cluster) -> None:
    end = time.monotonic() + _BACK_S
    while await asyncio.to_thread(cluster.ready_workers) < len(cluster.supervisor.workers):
        if time.monotonic() > end:
            raise RuntimeError("a worker did not come back")
        await asyncio.sleep(0.1)
