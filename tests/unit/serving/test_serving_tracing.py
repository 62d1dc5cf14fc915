"""Trace settings that maskserve serve gives to Triton."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from maskserve_common.config import Config, TraceConfig
from maskserve_serving import command, ports, runtime, tracing
from maskserve_serving.options import ServeOptions

URL = "http://collector:4318/v1/traces"


def test_options_win_over_the_file() -> None:
    tables = {"trace": {"otlp_url": "http://other:1/x", "rate": 7, "queue": 9}}
    assert tracing.with_trace(tables, ServeOptions(model="m")) == tables
    options = ServeOptions(model="m", otlp_url=URL, trace_rate=100)
    expected = {"trace": {"otlp_url": URL, "rate": 100, "queue": 9}}
    assert tracing.with_trace(tables, options) == expected


def test_without_a_collector_triton_is_told_nothing() -> None:
    assert tracing.trace_arguments(TraceConfig(rate=5), "worker-0") == []


def test_triton_sends_to_the_same_collector() -> None:
    config = TraceConfig(otlp_url=URL, rate=100, interval_s=0.5, queue=16)
    arguments = tracing.trace_arguments(config, "worker-3")
    assert set(arguments) >= {
        "--trace-config=mode=opentelemetry",
        "--trace-config=level=TIMESTAMPS",  # Triton's default level is off
        "--trace-config=rate=100",
        f"--trace-config=opentelemetry,url={URL}",
        "--trace-config=opentelemetry,resource=service.instance.id=worker-3",
        "--trace-config=opentelemetry,bsp_schedule_delay=500",
    }
    for traced, headers in ((TraceConfig(), "origin"), (config, "origin|traceparent")):
        assert tracing.forwarded_headers(traced) == [
            f"--http-header-forward-pattern=(?i)({headers})",
            f"--grpc-header-forward-pattern=(?i)({headers})",
        ]
    server = runtime.Runtime(Path("/t/bin/tritonserver"), None, (), "x")
    options = ServeOptions(model="m", triton_args=("--trace-config=rate=1",))
    worker_ports = ports.Ports(9000, 9001, 9002)
    line = command.command(options, Config(), server, worker_ports, "maskserve-9000-", arguments)
    assert line.index("--trace-config=rate=100") < line.index("--trace-config=rate=1")


@pytest.fixture
def control_server() -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """A server's URL, and what it was posted."""
    posted: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            posted.append((self.path, json.loads(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", posted
        server.shutdown()


def test_control_is_not_traced(control_server: tuple[str, list[tuple[str, Any]]]) -> None:
    url, posted = control_server
    assert tracing.untrace(url) is None
    assert posted == [("/v2/models/control/trace/setting", {"trace_level": ["OFF"]})]


def test_a_triton_that_does_not_listen_is_told_of() -> None:
    assert "control" in str(tracing.untrace("http://127.0.0.1:9"))
