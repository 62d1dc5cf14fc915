"""The command `maskserve serve`: its arguments, and a supervisor until a signal ends it."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from maskserve_core.config import WEIGHT_FORMS
from maskserve_serving.errors import ServeError
from maskserve_serving.options import (
    DEFAULT_BASE_PORT,
    DEFAULT_ROUTER_PORT,
    MODELS,
    ServeOptions,
    default_entries,
)
from maskserve_serving.runtime import check_packages
from maskserve_serving.stop_signals import StopSignals

if TYPE_CHECKING:
    from maskserve_serving.router import RouterProcess
    from maskserve_serving.supervisor import Supervisor
    from maskserve_serving.worker import WorkerProcess

DESCRIPTION = f"""\
Serve a model with Triton on this host: one server for each worker, watched and restarted.

Worker i listens at base + 10*i + {{0 HTTP, 1 gRPC, 2 metrics}}; the base is {DEFAULT_BASE_PORT}.
The router, with --router, listens at {DEFAULT_ROUTER_PORT} (HTTP), +1 (gRPC) and +2 (operators).
Ctrl-C or SIGTERM finishes the edits that were accepted and stops; a second one stops at once.
"""
EPILOG = """\
exit codes:
  0    stopped; every accepted edit was finished
  1    could not start, or stopped with edits unfinished
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, help="folder in diffusers format, or a hub id")
    add("--workers", type=int, default=1, metavar="N", help="Triton servers (default %(default)s)")
    add(
        "--devices-per-worker",
        type=lambda text: text if text == "auto" else int(text),
        default=0,
        choices=(1, 2, 4, 8, "auto"),
        metavar="N|auto",
        help="devices of each worker, 1, 2, 4 or 8 (default: the configuration's, or 1); auto: on "
        "a CPU the number of processes sharing its cores that serves most edits at once, tried "
        "with the model at start (a lone edit then has fewer cores); on GPUs 1",
    )
    add(
        "--cfg-devices",
        default="",
        metavar="A,B",
        help="one worker of two devices, GPUs by number (0,1) or cpu,cpu: under classifier-free "
        "guidance each computes one of an edit's two passes, at the same time",
    )
    add("--share-gpus", action="store_true", help="allow more workers than there are GPUs")
    add(
        "--name",
        default=os.environ.get("MASKSERVE_NAME", "worker"),
        help="worker i is called NAME-i in answers, metrics and logs; hosts behind one router "
        "want different names (default $MASKSERVE_NAME or worker)",
    )
    add("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    add(
        "--base-port",
        type=int,
        default=DEFAULT_BASE_PORT,
        metavar="PORT",
        help="where the workers' ports begin (default %(default)s)",
    )
    add("--router", action="store_true", help="run a router in front of the workers")
    add(
        "--router-port",
        type=int,
        default=DEFAULT_ROUTER_PORT,
        metavar="PORT",
        help="its HTTP port; then gRPC and the operators' (default %(default)s)",
    )
    add("--router-config", type=Path, metavar="FILE", help="configuration file of the router")
    add("--config", type=Path, metavar="FILE", help="configuration file (TOML)")
    add(
        "--log-dir",
        type=Path,
        default=Path("logs"),
        metavar="DIR",
        help="folder for the workers' logs (default %(default)s)",
    )
    add(
        "--tritonserver",
        type=Path,
        metavar="FILE",
        help="an installed tritonserver in place of the one from pip",
    )
    add(
        "--entries",
        type=lambda text: Path(text) if text else None,
        default=default_entries(),
        metavar="DIR",
        help="keep cached activations there, across restarts (default %(default)s); '' for nowhere",
    )
    add(
        "--adapters",
        default="",
        metavar="DIR|URL",
        help="serve the LoRAs there: NAME.safetensors, or NAME/pytorch_lora_weights.safetensors",
    )
    add(
        "--fuse-lora",
        action="append",
        default=[],
        metavar="FILE[:SCALE]",
        help="add a LoRA to the weights at start: every edit has it, and no step pays for it; "
        "may be given again",
    )
    add(
        "--controlnets",
        default="",
        metavar="DIR",
        help="serve the ControlNets there: a folder for each, as diffusers saves them",
    )
    add(
        "--controlnet-device",
        default="",
        metavar="D",
        help="run ControlNets there, in a server of their own beside the workers: cpu, cuda or "
        "cuda:N (default: on the base's device, before its step)",
    )
    add(
        "--weights",
        choices=WEIGHT_FORMS,
        default="",
        help="form of the denoiser's weights (default: the configuration's, or bf16)",
    )
    add(
        "--gguf",
        default="",
        metavar="FILE",
        help="take the transformer's weights of a FLUX model from this GGUF file",
    )
    add(
        "--plan",
        action="store_true",
        help="print what cards of 16 to 80 GB hold of the model, for each form of its weights, "
        "and end; weights are neither fetched nor loaded",
    )
    add(
        "--compile",
        action="store_true",
        help="compile parts of a FLUX model at start: a minute at first, then seconds",
    )
    add(
        "--load-timeout",
        type=float,
        default=900.0,
        metavar="S",
        help="time to load the model (default %(default)g)",
    )
    add(
        "--drain-grace",
        type=float,
        metavar="S",
        help="time to finish edits when stopping (default: the configuration's)",
    )
    add(
        "--otlp-url",
        default="",
        metavar="URL",
        help="send OpenTelemetry spans there, as http://localhost:4318/v1/traces",
    )
    add("--trace-rate", type=int, metavar="N", help="trace one request in N (default 1)")
    add("triton_args", nargs="*", metavar="-- ARG", help="further arguments for tritonserver")


def serve(given: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit code."""
    os.umask(0o077)  # whatever it starts: entries, templates and logs are nobody else's
    try:
        check_packages(router=given.router)
    except ServeError as error:
        print(f"maskserve serve: {error}", file=sys.stderr)
        return 1
    if given.plan:
        from maskserve_serving.cards import print_cards

        return print_cards(_options(given))
    # Only here: the other commands of `maskserve` have no use for it, nor for what it imports.
    from maskserve_serving.supervisor import Supervisor

    supervisor = Supervisor(_options(given))

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


def _options(given: argparse.Namespace) -> ServeOptions:
    return ServeOptions(
        model=given.model,
        workers=given.workers,
        devices_per_worker=given.devices_per_worker,
        cfg_devices=given.cfg_devices,
        share_gpus=given.share_gpus,
        name=given.name,
        host=given.host,
        base_port=given.base_port,
        router=given.router,
        router_port=given.router_port,
        router_config=given.router_config,
        config=given.config,
        log_dir=given.log_dir,
        tritonserver=given.tritonserver,
        entries=given.entries,
        adapters=given.adapters,
        fuse_loras=tuple(given.fuse_lora),
        controlnets=given.controlnets,
        controlnet_device=given.controlnet_device,
        load_timeout_s=given.load_timeout,
        drain_grace_s=given.drain_grace,
        weights=given.weights,
        gguf=given.gguf,
        compile=given.compile,
        otlp_url=given.otlp_url,
        trace_rate=given.trace_rate,
        triton_args=tuple(given.triton_args),
    )


def _announce(supervisor: Supervisor) -> None:
    fronts: list[WorkerProcess | RouterProcess] = list(supervisor.workers)
    if supervisor.router is not None:
        fronts.append(supervisor.router)
    for each in fronts:
        print(
            f"{each.name}: HTTP {each.http_url}  gRPC {each.grpc_url}  "
            f"metrics {each.metrics_url}  log {each.output}",
            flush=True,
        )
    print("ready; Ctrl-C finishes accepted edits and stops", flush=True)
    print(
        f"try: {_next_command((supervisor.router or supervisor.workers[0]).grpc_url)}", flush=True
    )


def _next_command(grpc_url: str) -> str:
    """An edit to try, as it can be pasted into another terminal in this folder."""
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
