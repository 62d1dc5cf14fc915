"""Faults in a cluster under load: two real workers behind a router, every answer judged."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import psutil

from maskserve_benchmarks.router_site import RouterSite
from maskserve_benchmarks.soak.load import Load
from maskserve_common.liveness import signed_in
from maskserve_serving.supervisor import Supervisor
from maskserve_serving.worker import WorkerProcess
from tests.support.draws import fresh_rng
from tests.support.faults.judged_load import (
    PATIENCE_S,
    Customer,
    Known,
    Tally,
    leave,
    stay,
)

CLIENTS = 4
LOAD_S = 3.0
"""Seconds of load after the fault."""
_BACK_S = 240.0
"""Seconds until a missing worker counts as lost."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The cluster under test."""

    supervisor: Supervisor
    site: RouterSite
    edits: list[Known]

    @property
    def victim(self) -> WorkerProcess:
        return self.supervisor.workers[0]

    def process(self, model: str) -> psutil.Process:
        """The victim's process that serves `model`, or its tritonserver."""
        if model == "tritonserver":
            return psutil.Process(self.victim.pid)
        for name, pid in signed_in(self.victim.spec.files.runtime):
            if name == model:
                return psutil.Process(pid)
        raise LookupError(f"no process serves {model}")

    def ready_workers(self) -> int:
        """The number of ready workers, by the router."""
        with suppress(OSError, ValueError):
            page = self.site.read("/metrics").decode()
            lines = [
                splitline
                for splitline in page.splitlines()
                if splitline.startswith("maskserve_worker_up{")
            ]
            return sum(float(line.rpartition(" ")[2]) == 1.0 for line in lines)
        return 0


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault."""

    name: str
    harm: Callable[[Cluster], Awaitable[None]]
    leaving: float = 0.0
    """Share of edits whose clients leave early."""


async def _kill_denoiser(cluster: Cluster) -> None:
    cluster.process("denoiser").kill()


async def _kill_triton(cluster: Cluster) -> None:
    cluster.process("tritonserver").kill()


async def _kill_router(cluster: Cluster) -> None:
    cluster.site.kill()
    await asyncio.sleep(0.5)
    await asyncio.to_thread(cluster.site.start)


async def _freeze(cluster: Cluster) -> None:
    """Stop the whole server for a while, or until it is given up."""
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
    """Clients that send headers a byte at a time, and bodies over the limit."""
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
                connection.sendall(fresh_rng().bytes(4096))
        await asyncio.sleep(0.02)


def _connect(url: str) -> socket.socket:
    host, _, port = url.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)


def faults() -> list[Fault]:
    return [
        Fault("denoiser killed", _kill_denoiser),
        Fault("tritonserver killed", _kill_triton),
        Fault("tritonserver stopped for 8 s", _freeze),
        Fault("drained and restarted", _drain_and_restart),
        Fault("router killed and started again", _kill_router),
        Fault("clients that leave at random", _nothing, leaving=0.4),
        Fault("slow headers, large bodies", _slow_and_large),
        Fault("random bytes on both ports", _random_bytes),
    ]


async def try_fault(cluster: Cluster, fault: Fault) -> Tally:
    """Cause one fault under load. Returns how the edits ended, once both workers serve again."""
    await _both_ready(cluster)
    site = cluster.site
    tally = Tally()
    customers = [
        Customer(random.Random(i), cluster.edits, tally, site.grpc_url, site.http_url, i % 2 == 1)
        for i in range(CLIENTS)
    ]
    load = Load(customers, {stay: 1 - fault.leaving, leave: fault.leaving}, tally)
    load.start()
    try:
        await asyncio.sleep(1.0)
        await fault.harm(cluster)
        await asyncio.sleep(LOAD_S)
    finally:
        await asyncio.to_thread(load.stop, 2 * PATIENCE_S)
    await _both_ready(cluster)
    return tally


async def _both_ready(cluster: Cluster) -> None:
    end = time.monotonic() + _BACK_S
    while await asyncio.to_thread(cluster.ready_workers) < len(cluster.supervisor.workers):
        if time.monotonic() > end:
            raise RuntimeError("a worker did not come back")
        await asyncio.sleep(0.1)
