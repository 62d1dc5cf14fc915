"""A clone after `make demo` that serves as the README says."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_serving.ports import free_base_port
from tests.support.environments import extras_of, make_environment

Block = tuple[str, str]


def blocks(document: str) -> list[Block]:
    """Language and code of a document's examples."""
    text = (CHECKOUT / document).read_text("utf-8")
    return re.findall(r"```(bash|python)\n(.*?)```", text, re.DOTALL)


SERVE_JOBS, SERVE = [code for _, code in blocks("README.md") if "maskserve serve" in code]
"""The servers of the README's jobs and of all other examples."""


@dataclass(frozen=True)
class Clone:
    """A folder in which a worker of the demo model serves behind a router."""

    folder: Path
    router: int
    """HTTP port of the router. The gRPC port is the next one."""
    try_command: str
    """The command that `maskserve serve` suggests."""

    @property
    def adapters(self) -> Path:
        """The folder of LoRAs. Tests may write to it."""
        return self.folder / "assets" / "adapters"

    def shell(self, code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", code],
            cwd=self.folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )


def environment() -> dict[str, str]:
    """The environment of a fresh shell, without the virtual environment and pytest's additions."""
    parent = str(Path(sys.executable).parent)
    path = [part for part in os.environ["PATH"].split(os.pathsep) if part != parent]
    names = ("PYTHONPATH", "VIRTUAL_ENV")
    variables = {name: value for name, value in os.environ.items() if name not in names}
    return variables | {"PATH": os.pathsep.join(path)}


@contextmanager
def serving_clone(folder: Path, devices: int = 1) -> Iterator[Clone]:
    """The README's server on free ports, in an environment with the packages that `make demo`
    installs. New LoRAs are found at once.
    """
    (folder / "assets").mkdir()
    for path in (CHECKOUT / "assets").iterdir():
        if path.name in ("adapters", "workflows"):  # examples write here
            shutil.copytree(path, folder / "assets" / path.name)
        else:
            (folder / "assets" / path.name).symlink_to(path)
    make_environment(folder / ".venv", extras_of("SERVING"))
    (folder / "worker.toml").write_text("[adapters]\nrescan_s = 0.2\n")
    options = f" --config worker.toml --devices-per-worker {devices}"
    with _served(folder, SERVE, options) as clone:
        yield clone


@contextmanager
def serving_jobs(folder: Path) -> Iterator[Clone]:
    """The server of the README's jobs on free ports, in a clone's folder."""
    with _served(folder, SERVE_JOBS) as clone:
        yield clone


@contextmanager
def _served(folder: Path, code: str, options: str = "") -> Iterator[Clone]:
    base = free_base_port(2)
    command = code.replace("\\\n", " ").strip() + options
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command} --base-port {base} --router-port {base + 10}"],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("try: "):
                break
        assert process.poll() is None, "".join(lines)
        yield Clone(folder, base + 10, lines[-1].removeprefix("try: "))
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=90)
    assert process.returncode == 0
