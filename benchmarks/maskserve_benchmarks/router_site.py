"""A router process, in front of workers that run already."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from msgspec import toml

_START_S = 60.0


class RouterSite:
    """Runs a router; use it as a context manager.

    Args:
        addresses: gRPC addresses of the workers.
        folder: folder for its configuration and log.
        tables: further tables of its configuration.
        ready: whether to wait until a worker takes edits.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        folder: Path,
        tables: dict[str, dict[str, object]] | None = None,
        *,
        ready: bool = True,
    ) -> None:
        http, grpc, admin = _free_ports(3)
        self.http_url, self.grpc_url = f"127.0.0.1:{http}", f"127.0.0.1:{grpc}"
        self.admin_url = f"127.0.0.1:{admin}"
        self.config = folder / "router.toml"
        self.log = folder / "router.log"
        self._ready = ready
        all_tables = dict(tables or {})
        listen = {"http_port": http, "grpc_port": grpc, "admin_port": admin}
        all_tables["listen"] = {**listen, **all_tables.get("listen", {})}
        all_tables["workers"] = {"addresses": list(addresses), **all_tables.get("workers", {})}
        self._tables = all_tables
        self._process: subprocess.Popen[bytes] | None = None
        self.write_config()

    def write_config(self, **tables: dict[str, object]) -> None:
        """Write the configuration, with these tables merged into it."""
        for name, values in tables.items():
            self._tables[name] = {**self._tables.get(name, {}), **values}
        self.config.write_bytes(toml.encode(self._tables))

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> RouterSite:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the router, and wait until it is ready.

        Raises:
            RuntimeError: the router does not become ready.
        """
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "maskserve_router", "--config", str(self.config)],
                stderr=log,
                stdout=log,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        end = time.monotonic() + _START_S
        path = "/readyz" if self._ready else "/healthz"
        while time.monotonic() < end:
            if self._process.poll() is not None:
                break
            if self.get(path) == 200:
                return
            time.sleep(0.05)
        self.stop()
        raise RuntimeError(f"the router is not ready: {self.log.read_text()[-2000:]}")

    def get(self, path: str) -> int:
        """Return the status of a page of the operators' port; 0 if there is no response."""
        try:
            with urllib.request.urlopen(f"http://{self.admin_url}{path}", timeout=5) as page:
                return int(page.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def read(self, path: str, *, post: bool = False) -> bytes:
        """Return a page of the operators' port."""
        data = b"" if post else None
        with urllib.request.urlopen(f"http://{self.admin_url}{path}", data, timeout=60) as page:
            body: bytes = page.read()
        return body

    def reload(self) -> None:
        """Make the router apply the workers of its configuration."""
        self.read("/reload", post=True)

    def kill(self) -> None:
        """Kill the router, as the kernel's memory killer does."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self, grace_s: float = 20.0) -> int | None:
        """Stop the router and let it drain; return its exit status."""
        process = self._process
        if process is None:
            return None
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        if process.poll() is None:
            process.kill()
        return process.wait()


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports
