"""The command `maskserve serve`: its arguments, and a supervisor that runs until a signal."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from maskserve_serving.errors import ServeError
from maskserve_serving.options import (
    DEFAULT_BASE_PORT,
    DEFAULT_ROUTER_PORT,
    MODELS,
    ServeOptions,
)
from maskserve_serving.runtime import check_packages, not_installed
from maskserve_serving.stop_signals import StopSignals

if TYPE_CHECKING:
    from maskserve_serving.router import RouterProcess
    from maskserve_serving.supervisor import Supervisor
    from maskserve_serving.worker import WorkerProcess

DESCRIPTION = f"""\
Serve a model with Triton on this host. Each worker has its own server, and a supervisor
restarts a server that fails.

Worker i listens at base + 10*i + {{0 HTTP, 1 gRPC, 2 metrics}}; the base is {DEFAULT_BASE_PORT}.
The router, with --router, listens at {DEFAULT_ROUTER_PORT} (HTTP), +1 (gRPC) and +2 (operators).
Ctrl-C or SIGTERM finishes the accepted edits and stops; a second signal stops at once.
"""
EPILOG = """\
exit codes:
  0    stopped; every accepted edit was finished
  1    could not start, or stopped with edits unfinished
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    ServeOptions.add_flags(parser)
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print how the model fits GPUs of 16 to 80 GB, for each number format of its weights, "
        "and exit; no weights are downloaded or loaded",
    )


CHECK_DESCRIPTION = """\
Say what a model is: its family, form and sizes, the jobs that it serves, the adapters and
ControlNets that fit, its licence, and what cards of 16 to 80 GB hold of it. Of a checkpoint file
also what is missing, and the flag that names it. No weights are read, and no server is asked.
"""
CHECK_EPILOG = """\
exit codes:
  0    it can be served with these options
  2    it cannot, or parts are missing; the last line says why

example: maskserve check z_image_turbo_fp8.safetensors --base models/Z-Image-Turbo
"""


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder, hub id, checkpoint file, LoRA or ControlNet",
    )
    parser.add_argument(
        "--base",
        default="",
        metavar="MODEL",
        help="of a checkpoint file, as in serve; of a LoRA or ControlNet, the model that it is for",
    )
    parser.add_argument(
        "--text-encoder",
        dest="text_encoders",
        action="append",
        default=[],
        metavar="MODEL",
        help="of a checkpoint file, as in serve; may be repeated",
    )
    parser.add_argument(
        "--vae", default="", metavar="MODEL", help="of a checkpoint file, as in serve"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def check(flags: argparse.Namespace) -> int:
    """Print what a model is and return the exit code."""
    try:
        from maskserve_serving.check import print_check
        from maskserve_serving.checkpoint import CheckpointParts
    except ModuleNotFoundError as error:  # a client's install
        print(f"maskserve check: {not_installed(error.name or '', 'engine')}", file=sys.stderr)
        return 2
    parts = CheckpointParts(flags.base, tuple(flags.text_encoders), flags.vae)
    return print_check(flags.model, parts, as_json=flags.json)


def serve(flags: argparse.Namespace) -> int:
    """Serve until a signal and return the exit code."""
    os.umask(0o077)  # entries, templates and logs are private
    try:
        check_packages(router=flags.router)
    except ServeError as error:
        print(f"maskserve serve: {error}", file=sys.stderr)
        return 1
    if flags.plan:
        from maskserve_serving.cards import print_cards

        return print_cards(ServeOptions.of_flags(flags))
    # Imported late: other commands of `maskserve` do not need it, nor its imports.
    from maskserve_serving.supervisor import Supervisor

    supervisor = Supervisor(ServeOptions.of_flags(flags))

    def at_once() -> None:
        # Not print: the signal may have come in the middle of one.
        with suppress(OSError):
            os.write(sys.stdout.fileno(), b"stopping at once\n")
        supervisor.abort()

    stop = StopSignals(at_once)
    try:
        supervisor.start(until=stop.is_set)
    except ServeError as error:
        print(f"maskserve serve: {error}", file=sys.stderr)
        return 1
    if not stop.is_set():
        _announce(supervisor)
        stop.wait()
    print(f"stopping; {supervisor.in_flight()} edits in flight", flush=True)
    finished = supervisor.stop()
    print("stopped" if finished else "stopped; not every accepted edit was finished", flush=True)
    return 0 if finished else 1


def _announce(supervisor: Supervisor) -> None:
    fronts: list[WorkerProcess | RouterProcess] = list(supervisor.workers)
    if supervisor.router is not None:
        fronts.append(supervisor.router)
    for server in fronts:
        print(
            f"{server.name}: HTTP {server.http_url}  gRPC {server.grpc_url}  "
            f"metrics {server.metrics_url}  log {server.output}",
            flush=True,
        )
    if not fronts:
        for service in supervisor.services:
            print(f"{service.name}: gRPC {service.grpc_url}  log {service.output}", flush=True)
    print("ready; Ctrl-C finishes accepted edits and stops", flush=True)
    if fronts:
        front = supervisor.router or supervisor.workers[0]
        print(f"try: {_next_command(front.grpc_url)}", flush=True)


def _next_command(grpc_url: str) -> str:
    """Return an example edit that can be pasted into another terminal in this folder."""
    called = Path(sys.argv[0])
    program = (
        str(called) if called.name == "maskserve" else f"{sys.executable} -m maskserve_client.cli"
    )
    demo = MODELS.parent / "assets" / "demo"  # in a checkout
    folder = os.path.relpath(demo) if demo.is_dir() else "."
    return (
        f"{program} edit --url {grpc_url} --image {folder}/source.jpg --mask {folder}/mask.png "
        '--prompt "a red star" --out edited.png'
    )
