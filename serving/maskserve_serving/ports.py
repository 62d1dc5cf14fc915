"""TCP ports of the workers and services."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from maskserve_serving.errors import ServeError
from maskserve_serving.files import workers_by_base

STRIDE = 10  # ports set aside per worker


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of one server."""

    http: int
    grpc: int
    metrics: int
    link: int = 0
    """Port of a ControlNet service for the steps of other hosts' denoisers; 0: none."""

    @classmethod
    def of_worker(cls, base: int, index: int) -> Ports:
        first = base + STRIDE * index
        return cls(first, first + 1, first + 2)

    @classmethod
    def of_service(cls, base: int, index: int = 0, *, steps: bool = False) -> Ports:
        """Return a service's ports, from those reserved for the worker of this index.

        Args:
            base: the first port of all.
            index: the service's number.
            steps: whether it has ControlNets.
        """
        first = base + STRIDE * index
        return cls(first + 4, first + 5, first + 6, first + 3 if steps else 0)

    @classmethod
    def of_nodes(cls, base: int) -> Ports:
        """Return the node server's ports, from those reserved for the first worker."""
        return cls(base + 7, base + 8, base + 9)

    def all(self) -> dict[str, int]:
        ports = {"HTTP": self.http, "gRPC": self.grpc, "metrics": self.metrics}
        return ports | ({"steps": self.link} if self.link else {})


def check_free(host: str, ports: Ports, option: str = "--base-port") -> None:
    """Raise a ServeError that names the first port in use."""
    for use, port in ports.all().items():
        if not 0 < port < 65536:
            raise ServeError(f"port {port} ({use}) does not exist; choose another {option}")
        problem = _problem(host, port)
        if problem is not None:
            raise ServeError(
                f"port {port} ({use}) on {host} cannot be used: {problem}; stop what uses it or "
                f"choose another {option}"
            )


def check_distinct(ports_by_name: Mapping[str, Ports]) -> None:
    """Raise a ServeError that names two servers of one supervisor with a port in common."""
    name_by_port: dict[int, str] = {}
    for name, ports in ports_by_name.items():
        for use, port in ports.all().items():
            if other := name_by_port.get(port):
                raise ServeError(
                    f"port {port} ({use}) of {name} is a port of {other}, too; choose another "
                    "--base-port or --router-port"
                )
            name_by_port[port] = name


def reachable(host: str) -> str:
    """Return the address to call a server that listens at `host`, in a URL's form."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)


def free_base_port(workers: int = 1, host: str = "127.0.0.1") -> int:
    """Return a base port whose ports are all free and not another supervisor's.

    For tests and demonstrations.
    """
    step = STRIDE * max(workers, 1)
    taken_ports = {
        port
        for base, count in workers_by_base().items()
        for port in range(base, base + STRIDE * max(count, 1))
    }
    start = 19000 + step * begins_at(os.getpid())
    base: int
    for base in (*range(start, 32000, step), *range(19000, start, step)):
        worker_ports = [Ports.of_worker(base, i) for i in range(workers)]
        port_numbers = [port for ports in worker_ports for port in ports.all().values()]
        if taken_ports.isdisjoint(port_numbers) and all(
            _problem(host, port) is None for port in port_numbers
        ):
            return base
    raise ServeError("no free ports between 19000 and 32000")


def begins_at(pid: int) -> int:
    """Return where in 500 a process begins to search for ports.

    Processes that start together search far apart: otherwise both could find the same port before
    one binds it.
    """
    return pid * 61 % 500


def _problem(host: str, port: int) -> str | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: connections of a server that has just ended do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return (error.strerror or str(error)).lower()
    return None
