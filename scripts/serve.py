"""Serve maskserve's workers on this host.

    python scripts/serve.py --model assets/models/demo --workers 1

Worker i listens at base + 10·i + {0 HTTP, 1 gRPC, 2 metrics}. Ctrl-C or SIGTERM finishes the edits
that were accepted and stops; a second one stops at once.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from serving.errors import ServeError
from serving.options import ServeOptions
from serving.supervisor import Supervisor


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    stop = threading.Event()
    supervisor = Supervisor(options)

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            print("stopping at once", flush=True)
            supervisor.abort()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    try:
        supervisor.start(until=stop)
    except ServeError as error:
        print(f"serve.py: {error}", file=sys.stderr)
        return 1
    if not stop.is_set():
        announce(supervisor)
        stop.wait()
    print(f"stopping; {supervisor.in_flight()} edits in flight", flush=True)
    finished = supervisor.stop()
    print("stopped" if finished else "stopped; not every accepted edit was finished", flush=True)
    return 0 if finished else 1


def parse(argv: list[str] | None) -> ServeOptions:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--model", required=True, help="folder in diffusers format, or a hub id")
    add("--workers", type=int, default=1, help="Triton servers, each with a denoiser of its own")
    add("--host", default="127.0.0.1", help="address to listen on")
    add(
        "--base-port",
        type=int,
        default=9000,
        help="worker i: base + 10*i + {0 HTTP, 1 gRPC, 2 metrics}",
    )
    add("--config", type=Path, help="configuration file (TOML)")
    add("--log-dir", type=Path, default=Path("logs"), help="folder for the workers' logs")
    add("--tritonserver", type=Path, help="an installed tritonserver in place of the one from pip")
    add("--load-timeout", type=float, default=900.0, metavar="S", help="time to load the model")
    add("--drain-grace", type=float, metavar="S", help="time to finish edits when stopping")
    add(
        "--otlp-url",
        default="",
        metavar="URL",
        help="send OpenTelemetry spans there, as http://localhost:4318/v1/traces",
    )
    add("--trace-rate", type=int, metavar="N", help="trace one request in N (default 1)")
    add("triton_args", nargs="*", metavar="-- ARG", help="further arguments for tritonserver")
    given = parser.parse_args(argv)
    return ServeOptions(
        model=given.model,
        workers=given.workers,
        host=given.host,
        base_port=given.base_port,
        config=given.config,
        log_dir=given.log_dir,
        tritonserver=given.tritonserver,
        load_timeout_s=given.load_timeout,
        drain_grace_s=given.drain_grace,
        otlp_url=given.otlp_url,
        trace_rate=given.trace_rate,
        triton_args=tuple(given.triton_args),
    )


def announce(supervisor: Supervisor) -> None:
    for worker in supervisor.workers:
        print(
            f"{worker.name}: HTTP {worker.http_url}  gRPC {worker.grpc_url}  "
            f"metrics {worker.metrics_url}  log {worker.spec.log}",
            flush=True,
        )
    print("ready; Ctrl-C finishes accepted edits and stops", flush=True)


if __name__ == "__main__":
    sys.exit(main())
