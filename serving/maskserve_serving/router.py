"""The router in front of this host's workers, as a process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import Ports, check_free, reachable
from maskserve_serving.process import Process
from maskserve_serving.source import node_path

# Its event loop decodes no pictures: it answers within milliseconds.
_SILENT_S = 10.0
_DRAIN_GRACE_S = 60.0
_QUIET = {"GRPC_VERBOSITY": "NONE"}
"""GRPC writes log lines of its own for malformed requests."""


class RouterProcess(Process):
    """`maskserve-router` for the workers of one supervisor.

    Args:
        options: options of the supervisor.
        workers: the workers' gRPC addresses.
        run_dir: folder of the supervisor.
    """

    def __init__(self, options: ServeOptions, workers: Sequence[str], run_dir: Path) -> None:
        self._options, self._workers, self._run_dir = options, workers, run_dir
        base = options.router_port
        self.ports = Ports(base, base + 1, base + 2)
        host = reachable(options.host)
        url = f"http://{host}:{self.ports.http}"
        output = options.log_dir / "router.log"
        super().__init__("router", "maskserve-router", url, output, run_dir, options.report)
        self.grpc_url = f"{host}:{self.ports.grpc}"
        self.metrics_url = f"http://127.0.0.1:{self.ports.metrics}/metrics"

    def check_ports(self) -> None:
        check_free(self._options.host, self.ports, "--router-port")

    def start(self) -> None:
        self.check_ports()
        command = [sys.executable, "-m", "maskserve_router", "--host", self._options.host]
        for name, port in zip(("http", "grpc", "admin"), self.ports.all().values(), strict=True):
            command += [f"--{name}-port", str(port)]
        for worker in self._workers:
            command += ["--worker", worker]
        if self._options.nodes is not None:
            command += ["--node", f"127.0.0.1:{Ports.of_nodes(self._options.base_port).grpc}"]
        if self._options.nodes is not None or self._options.workflows is not None:
            command += ["--values", str(self._run_dir / "values")]
        if node_folders := [*self._options.node_folders, *node_path(self._options.nodes)]:
            command += ["--node-path", os.pathsep.join(node_folders)]
        if self._options.workflows is not None:
            command += ["--workflows", str(self._options.workflows.absolute())]
        if self._options.router_config is not None:
            command += ["--config", str(self._options.router_config)]
        if self._options.otlp_url:
            command += ["--otlp-url", self._options.otlp_url]
        if self._options.trace_rate is not None:
            command += ["--trace-rate", str(self._options.trace_rate)]
        self.launch(command, _QUIET | {**os.environ, "PYTHONUNBUFFERED": "1"})

    def progress(self) -> str:
        return "waiting for a worker"

    def health_problem(self) -> str | None:
        return self.unresponsive(_SILENT_S)

    def in_flight(self) -> int:
        """Return 0: the workers count the edits that it has sent them."""
        return 0

    def finish_edits(self, grace_s: float | None) -> bool:
        return self.end_within(_DRAIN_GRACE_S if grace_s is None else grace_s)
