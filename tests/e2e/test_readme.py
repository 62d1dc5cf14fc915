"""The README's commands, as printed, in a shell that knows nothing of the virtual environment.

Only the ports differ: others may use those of the README.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from maskserve_serving.ports import Ports, free_base_port

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(
    r"```(bash|python)\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
)
SERVE = [code for language, code in BLOCKS if "maskserve serve" in code]
EXAMPLES = [
    (language, code)
    for language, code in BLOCKS
    if re.search(r"localhost:(900\d|8081|8080/v2)|maskserve (edit|status|templates)", code)
]


@dataclass(frozen=True)
class Clone:
    """A folder with what a clone has after `make setup`, and a worker that serves it behind a
    router.
    """

    folder: Path
    ports: Ports
    router: int
    """Its HTTP port; gRPC is behind it."""
    try_command: str
    """What `maskserve serve` says to try next."""

    def shell(self, code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", code],
            cwd=self.folder,
            env=environment() | {"MASKSERVE_URL": f"localhost:{self.ports.grpc}"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )


def environment() -> dict[str, str]:
    """Of a fresh shell: without the virtual environment and without what pytest added."""
    own = str(Path(sys.executable).parent)
    path = [part for part in os.environ["PATH"].split(os.pathsep) if part != own]
    names = ("PYTHONPATH", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return kept | {"PATH": os.pathsep.join(path)}


@pytest.fixture(scope="module", params=["1", pytest.param("2", marks=pytest.mark.slow)])
def clone(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Clone]:
    """Of a worker of one device, and of two."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "assets").symlink_to(ROOT / "assets")
    (folder / ".venv").symlink_to(sys.prefix)
    [serve] = SERVE
    base = free_base_port(2)
    command = serve.partition("#")[0].strip()
    process = subprocess.Popen(
        [
            "bash",
            "-c",
            f"exec {command} --adapters assets/adapters --devices-per-worker {request.param} "
            f"--controlnets assets/controlnets --base-port {base} "
            f"--router --router-port {base + 10}",
        ],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("try: "):
                break
        assert process.poll() is None, "".join(said)
        tried = said[-1].removeprefix("try: ")
        yield Clone(folder, Ports.of_worker(base, 0), base + 10, tried)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=90)
    assert process.returncode == 0


def check_edited(folder: Path) -> None:
    with (
        Image.open(folder / "edited.png") as edited,
        Image.open(ROOT / "assets" / "demo" / "source.jpg") as source,
    ):
        assert edited.size == source.size


def test_the_readme_has_its_examples() -> None:
    tools = ("maskserve edit", "curl", "tritonclient.grpc", "maskserve_client")
    for tool in tools:
        assert any(tool in code for _, code in EXAMPLES), tool


@pytest.mark.parametrize(
    ("language", "code"), EXAMPLES, ids=[code.split("\n")[0][:40] for _, code in EXAMPLES]
)
def test_an_example_runs_as_printed(language: str, code: str, clone: Clone) -> None:
    edited = clone.folder / "edited.png"
    edited.unlink(missing_ok=True)
    code = code.replace("localhost:9000", f"localhost:{clone.ports.http}")
    code = code.replace("localhost:9001", f"localhost:{clone.ports.grpc}")
    code = code.replace("localhost:8080", f"localhost:{clone.router}")
    code = code.replace("localhost:8081", f"localhost:{clone.router + 1}")
    if language == "python":
        (clone.folder / "example.py").write_text(code)
        code = ".venv/bin/python example.py"
    ran = clone.shell(code)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    check_edited(clone.folder)


def test_what_serve_says_to_try_works(clone: Clone) -> None:
    ran = clone.shell(clone.try_command)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    check_edited(clone.folder)
