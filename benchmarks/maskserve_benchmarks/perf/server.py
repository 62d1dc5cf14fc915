"""The worker under measurement: a running one, or one that this module starts and stops."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from maskserve_benchmarks.perf.errors import PerfError
from maskserve_benchmarks.perf.inputs import Edit
from maskserve_client import Client, MaskserveError
from maskserve_serving.heartbeat import is_ready
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor

COUNTERS = ("edits_total", "cache_hits_total", "cache_misses_total")
_SETTLE_LIMIT_S = 60.0
_RESTART_LIMIT_S = 60.0
_EDIT_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Server:
    """Addresses of a worker or a router."""

    http: str
    """host:port for HTTP."""
    grpc: str
    """host:port for gRPC."""
    patience_s: float = 3.0
    """Seconds to wait for a server that should answer and does not."""

    def url(self, protocol: str) -> str:
        return self.http if protocol == "http" else self.grpc

    def status(self) -> dict[str, Any] | None:
        """Return the worker's status record; None if the server has none, as a router."""
        with Client(self.grpc) as client:
            try:
                return client.control("status")
            except MaskserveError:
                return None

    def counters(self) -> dict[str, int]:
        """Return totals since the worker started; empty if the server has no status record."""
        status = self.status()
        if status is None:
            return {}
        return {name: int(status["counters"].get(name, 0)) for name in COUNTERS}

    def growth(self, before: dict[str, int]) -> dict[str, int]:
        """Return the growth of the counters; those of a worker that restarted meanwhile count from
        0.
        """
        grown = {}
        for name, total in self.counters().items():
            start = before.get(name, 0)
            grown[name] = total - start if total >= start else total
        return grown

    def wait_ready(self) -> None:
        """Wait until the server answers: a worker of this measurement restarts after a failure.

        A server that stays away is not an error here; perf_analyzer then reports it.
        """
        end = time.monotonic() + self.patience_s
        while not is_ready(f"http://{self.http}", 5.0) and time.monotonic() < end:
            time.sleep(0.5)

    def warm(self, edits: list[Edit]) -> None:
        """Send each edit once, then wait until no template is being primed.

        The first edits of a shape also prepare kernels, and a template's second edit primes it.

        Raises:
            PerfError: the server refuses the edits.
        """
        with Client(self.grpc) as client:
            try:
                for edit in edits:
                    settings = edit.settings
                    client.edit(
                        edit.image,
                        edit.mask,
                        edit.prompt,
                        images=edit.references,
                        control=edit.control,
                        timeout=_EDIT_LIMIT_S,
                        **settings,
                    )
            except MaskserveError as error:
                raise PerfError(f"an edit to warm up {self.grpc} failed: {error}") from error
        end = time.monotonic() + _SETTLE_LIMIT_S
        while self._busy() and time.monotonic() < end:
            time.sleep(0.2)

    def _busy(self) -> bool:
        status = self.status()
        return status is not None and bool(status["running"] or status["waiting"])


def running_server(grpc: str, http: str | None) -> Server:
    """Return a server by its gRPC address; without `http`, HTTP is at the port below.

    Raises:
        PerfError: an address is not host:port.
    """
    host, port = _split("--url", grpc)
    if http is None:
        http = f"{host}:{port - 1}"
    _split("--http-url", http)
    return Server(http=http, grpc=grpc)


def _split(option: str, url: str) -> tuple[str, int]:
    host, _, port = url.rpartition(":")
    if "/" in url or not (host and port.isdecimal() and 1 < int(port) < 65536):
        raise PerfError(f"{option}: {url!r} is not accepted; give host:port, as in localhost:9001")
    return host, int(port)


@contextmanager
def own_server(
    model: str, log_dir: Path, config: Path | None = None, *, devices: Literal[0, 1, 2, 4, 8] = 0
) -> Iterator[Server]:
    """Run a worker on free ports. It drains and stops at the end, and stops at once on an
    exception.

    Args:
        model: the model to serve.
        log_dir: folder for its logs.
        config: a configuration file.
        devices: number of devices of the worker; 0: the configuration's number, or 1.

    Raises:
        ServeError: the worker cannot start.
    """
    with own_workers(model, log_dir, 1, config, devices=devices) as [server]:
        yield server


@contextmanager
def own_workers(
    model: str,
    log_dir: Path,
    count: int,
    config: Path | None = None,
    *,
    devices: Literal[0, 1, 2, 4, 8] = 0,
) -> Iterator[list[Server]]:
    """Run several workers on free ports; they share the cores."""
    options = ServeOptions(
        model=model,
        base_port=free_base_port(count),
        log_dir=log_dir,
        config=config,
        workers=count,
        devices_per_worker=devices,
    )
    supervisor = Supervisor(options)
    supervisor.start()
    try:
        yield [
            Server(
                worker.http_url.removeprefix("http://"),
                worker.grpc_url,
                patience_s=_RESTART_LIMIT_S,
            )
            for worker in supervisor.workers
        ]
    except BaseException:
        # An abandoned measurement has no client that waits for its edits.
        supervisor.kill()
        raise
    supervisor.stop()
