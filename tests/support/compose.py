"""`docker compose` on this machine's engine, for one project on free ports."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]


def missing() -> str:
    """The missing requirement for running containers on this machine; empty if there is none."""
    if shutil.which("docker") is None:
        return "docker is not installed"
    result = subprocess.run(["docker", "info"], capture_output=True, text=True, check=False)
    return "" if result.returncode == 0 else f"no Docker Engine answers: {result.stderr.strip()}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Compose:
    """A profile of docker-compose.yml, started beside everything else on this machine.

    Args:
        project: prefix of all names.
        profile: of docker-compose.yml.
        env: variables for it; they override those of `.env`.
    """

    def __init__(
        self, project: str, profile: str = "cpu", env: dict[str, str] | None = None
    ) -> None:
        self.http, self.grpc, self.prometheus = free_port(), free_port(), free_port()
        plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
        program = ["docker", "compose"] if plugin.returncode == 0 else ["docker-compose"]
        self._command = [*program, "--project-name", project, "--profile", profile]
        self._file: list[str] = []
        self._env = {
            **os.environ,
            "COMPOSE_PROFILES": profile,
            "MASKSERVE_HTTP_PORT": str(self.http),
            "MASKSERVE_GRPC_PORT": str(self.grpc),
            "MASKSERVE_PROMETHEUS_PORT": str(self.prometheus),
            "MASKSERVE_HOST_TIER": "256m",
            **(env or {}),
        }

    def change(self, file: Path, change: Callable[[dict[str, Any]], None]) -> None:
        """Use a changed rendering of the profile from here on.

        Args:
            file: file for the changed rendering.
            change: changes the profile's services, by name.
        """
        rendered = yaml.safe_load(self.run("config"))
        change(rendered["services"])
        file.write_text(yaml.safe_dump(rendered), encoding="utf-8")
        self._file = ["--file", str(file)]

    def run(self, *arguments: str, timeout_s: float = 600) -> str:
        """A compose command's output; AssertionError with both streams if it fails."""
        result = subprocess.run(
            [*self._command, *self._file, *arguments],
            cwd=ROOT,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert result.returncode == 0, (
            f"{arguments}: {result.stdout[-4000:]}\n{result.stderr[-4000:]}"
        )
        return result.stdout

    def container(self, service: str) -> dict[str, Any]:
        """The engine's description of a service's container, the first if it has several."""
        return self.containers(service)[0]

    def containers(self, service: str) -> list[dict[str, Any]]:
        names = self.run("ps", "-q", service).split()
        result = subprocess.run(
            ["docker", "inspect", *names], capture_output=True, text=True, check=True
        )
        descriptions: list[dict[str, Any]] = json.loads(result.stdout)
        return descriptions

    def healthy(self, service: str) -> bool:
        """Whether all its containers are."""
        states = [description["State"] for description in self.containers(service)]
        for state in states:
            assert state["Running"], f"{service} ended: {self.run('logs', '--tail=40', service)}"
        return all(state["Health"]["Status"] == "healthy" for state in states)
