"""Sizes of the images, and how long their containers take until they serve.

    docker compose --profile cpu build
    python scripts/bench containers --json docs/benchmarks/containers.json

Starts the profile cpu of docker-compose.yml without Grafana, whose image is its makers', under a
project name of its own, and asks each container by its own health check, five times a second, from
when the engine started it. All start at once, as with `docker compose up`. Then it takes everything
down. Needs a Docker Engine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from datetime import date, datetime
from pathlib import Path
from typing import Any

from maskserve_harness.benchmarks.machine import machine
from maskserve_harness.checkout import CHECKOUT

SERVICES = ("cpu-0", "cpu-1", "router-cpu", "page", "prometheus")
_IMAGES = ("cpu", "page", "prometheus")
_PORTS = ("HTTP", "GRPC", "PAGE", "PROMETHEUS", "GRAFANA")
_LIMIT_S = 600.0


def main() -> int:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    options = parser.parse_args()
    if shutil.which("docker") is None or _docker("info", check=False) is None:
        print("containers: no Docker Engine answers", file=sys.stderr)
        return 2
    figures: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "hardware": machine(),
        "date": date.today().isoformat(),
        "image_mb": {name: _megabytes(f"maskserve:{name}") for name in _IMAGES},
        "ready_s": ready_seconds(),
    }
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    print("| image | MB |\n|---|---:|")
    for name, size in figures["image_mb"].items():
        print(f"| `{name}` | {size:,} |")
    print("\n| service | seconds until it serves |\n|---|---:|")
    for name, seconds in figures["ready_s"].items():
        print(f"| `{name}` | {seconds:.1f} |")
    return 0


def ready_seconds() -> dict[str, float]:
    """Of each service, from the start of its container until its health check succeeds."""
    compose = _Compose(f"maskserve-bench-{os.getpid()}")
    try:
        compose.run("up", "--no-build", "--detach", *SERVICES)
        found: dict[str, float] = {}
        end = time.monotonic() + _LIMIT_S
        names = {service: compose.run("ps", "-q", service).split()[0] for service in SERVICES}
        while len(found) < len(names):
            for service, name in names.items():
                if service not in found and _serves(name):
                    found[service] = time.time() - _started(name)
            if time.monotonic() > end:
                raise RuntimeError(f"{sorted(set(names) - set(found))} do not serve")
            time.sleep(0.2)
    finally:
        compose.run("down", "--volumes", "--timeout", "90")
    return {service: round(found[service], 1) for service in SERVICES}


class _Compose:
    """docker-compose.yml under a project of its own, on free ports."""

    def __init__(self, project: str) -> None:
        plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
        program = ["docker", "compose"] if plugin.returncode == 0 else ["docker-compose"]
        self._command = [*program, "--project-name", project, "--profile", "cpu"]
        ports = {f"MASKSERVE_{name}_PORT": str(_free_port()) for name in _PORTS}
        set_here = {"COMPOSE_PROFILES": "cpu", "MASKSERVE_HOST_TIER": "256m"}
        self._env = {**os.environ, **ports, **set_here}

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._command, *arguments],
            cwd=CHECKOUT,
            env=self._env,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"compose {arguments[0]}: {done.stderr[-2000:]}")
        return done.stdout


def _serves(container: str) -> bool:
    """Whether the container's own health check succeeds now."""
    test = json.loads(_docker("inspect", "-f", "{{json .Config.Healthcheck.Test}}", container))
    command = test[1:] if test[0] == "CMD" else ["sh", "-c", test[1]]
    return _docker("exec", container, *command, check=False) is not None


def _started(container: str) -> float:
    told = _docker("inspect", "-f", "{{.State.StartedAt}}", container).strip()
    return datetime.fromisoformat(told[:26].rstrip("Z") + "+00:00").timestamp()


def _megabytes(image: str) -> int:
    return round(int(_docker("image", "inspect", "-f", "{{.Size}}", image)) / 1e6)


def _docker(*arguments: str, check: bool = True) -> Any:
    """The output of a docker command; None if it fails and may."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=check)
    return done.stdout if done.returncode == 0 else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
